"""Trajectories in, their prefix tree out: arrays over segments, from sorting and comparing neighbours."""

from harts.tree.conflicts import RouteConflicts, route_conflicts
from harts.tree.describe import TreeSummary, describe_tree
from harts.tree.draw import draw_tree
from harts.tree.prefix_tree import PrefixTree, build_prefix_tree, tree_from_lcp

__all__ = [
    "PrefixTree",
    "RouteConflicts",
    "TreeSummary",
    "build_prefix_tree",
    "describe_tree",
    "draw_tree",
    "route_conflicts",
    "tree_from_lcp",
]
