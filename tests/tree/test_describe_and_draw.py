"""The worked example described and drawn."""

from __future__ import annotations

from harts.data import TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.tree import TreeSummary, build_prefix_tree, describe_tree, draw_tree, tree_from_lcp

DRAWING = """\
ab x4
├─ c x3, ends 3
│  ├─ de x1, ends 0
│  └─ z x1, ends 2
└─ xy x1, ends 1"""


def test_summary_of_the_worked_example():
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    assert describe_tree(tree) == TreeSummary(
        num_trajectories=4, num_trajectory_tokens=16, num_tokens=8, ratio=2.0, num_branch_points=2, max_depth=2
    )


def test_prefixes_and_duplicates_are_no_branch_points():
    summary = describe_tree(tree_from_lcp(range(4), [1, 3, 3, 6], [0, 1, 3, 3]))
    assert (summary.num_branch_points, summary.max_depth) == (0, 0)


def test_drawing_of_the_worked_example():
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    assert draw_tree(tree, lambda packed: "".join("abcdezxy"[i] for i in packed)) == DRAWING


def test_drawing_without_text_counts_tokens_and_shows_every_root():
    tree = tree_from_lcp([0, 1, 2], [2, 2, 3], [0, 2, 0])
    assert draw_tree(tree) == "(2 tokens) x2, ends 0, 1\n(3 tokens) x1, ends 2"
