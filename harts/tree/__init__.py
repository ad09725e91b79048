"""Trajectories in, their prefix tree out: arrays over segments, from sorting and comparing neighbours."""

from harts.tree.describe import TreeSummary, describe_tree
from harts.tree.draw import draw_tree
from harts.tree.prefix_tree import PrefixTree, build_prefix_tree, tree_from_lcp

__all__ = ["PrefixTree", "TreeSummary", "build_prefix_tree", "describe_tree", "draw_tree", "tree_from_lcp"]
