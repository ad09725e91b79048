"""Rollouts in, what sharing is in them out: numbers, where sharing ends and why, and one HTML page."""

from harts.inspect.breaks import BreakFinder, BreakReport
from harts.inspect.groups import GroupTree, group_tree
from harts.inspect.summary import GroupReport, Inspection, InspectReport
from harts.inspect.view import TreeView, describe

__all__ = [
    "BreakFinder",
    "BreakReport",
    "GroupReport",
    "GroupTree",
    "InspectReport",
    "Inspection",
    "TreeView",
    "describe",
    "group_tree",
]
