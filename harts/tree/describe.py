"""What a tree looks like, in six numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harts.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSummary:
    """Size and shape of a prefix tree.

    Example:
        The words abcde, abxy, abcz, abc: 4 trajectories, 16 tokens, 8 distinct, ratio 2.0, 2 branch points
        (after ab and after abc), 2 of them on one path.
    """

    num_trajectories: int
    """N."""
    num_trajectory_tokens: int
    """F, the tokens of all trajectories."""
    num_tokens: int
    """T, the distinct tokens."""
    ratio: float
    """F / T, >= 1. How much less a tree computes."""
    num_branch_points: int
    """Tokens after which paths part. A trajectory that ends inside another, or equals it, makes none."""
    max_depth: int
    """Largest number of branch points on one path."""


def describe_tree(tree: PrefixTree) -> TreeSummary:
    """Summarise a tree."""
    branches_S = tree.num_children_S > 1
    above: list[int] = []  # branch points down to and including each segment's last token
    for parent, branches in zip(tree.parent_S.tolist(), branches_S.tolist(), strict=True):
        above.append((above[parent] if parent >= 0 else 0) + branches)
    return TreeSummary(
        num_trajectories=tree.order_N.size,
        num_trajectory_tokens=tree.num_trajectory_tokens,
        num_tokens=tree.num_tokens,
        ratio=tree.num_trajectory_tokens / tree.num_tokens,
        num_branch_points=int(np.count_nonzero(branches_S)),
        max_depth=max(above),
    )
