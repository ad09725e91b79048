"""The prefix tree of a step, as arrays over segments.

Built by sorting the trajectories and comparing neighbours: three arrays (order, length, longest common prefix
with the trajectory before) fix the whole tree. No Python object per token, no recursion. Roots need no common
token, so the tree may be a forest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts.data import TrajectoryBatch
from harts.tree.lcp import sort_with_lcp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixTree:
    """Trajectories merged where they start with the same tokens.

    `N` arrays are in lexicographic order of the trajectories (a prefix before what it begins); `S` arrays are in
    pre-order, so the packed tokens of a segment are contiguous and those of its descendants follow it. A segment
    ends where paths part or a trajectory ends, so the same trajectories run through all of its tokens.

    Example (the words abcde, abxy, abcz, abc in that order):
        order_N   [3, 0, 2, 1]      abc abcde abcz abxy
        length_N  [3, 5, 4, 4]
        lcp_N     [0, 3, 3, 2]
        segments  ab, c, de, z, xy  parent_S [-1, 0, 1, 1, 0]  start_S [0, 2, 3, 3, 2]  end_S [2, 3, 5, 4, 4]
        offset_S  [0, 2, 3, 5, 6]   multiplicity_S [4, 3, 1, 1, 1]  tail_N [1, 2, 3, 4]
    """

    order_N: NDArray[np.int64]
    """[N] int64. Trajectory number (place in the batch) of each; equal trajectories in batch order."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 1. Tokens of each."""
    lcp_N: NDArray[np.int64]
    """[N] int64. Tokens shared with the trajectory before; 0 for the first."""
    parent_S: NDArray[np.int64]
    """[S] int64. Segment above, smaller than the segment's own number; -1 for a root."""
    start_S: NDArray[np.int64]
    """[S] int64. Depth (path position) of the first token."""
    end_S: NDArray[np.int64]
    """[S] int64. One past the depth of the last token; > start."""
    offset_S: NDArray[np.int64]
    """[S] int64. Packed index of the first token."""
    multiplicity_S: NDArray[np.int64]
    """[S] int64, >= 1. Trajectories that contain the segment."""
    tail_N: NDArray[np.int64]
    """[N] int64. Segment that holds the last token of each trajectory."""

    @property
    def num_tokens(self) -> int:
        """T, the distinct tokens."""
        return int((self.length_N - self.lcp_N).sum())

    @property
    def num_trajectory_tokens(self) -> int:
        """F, the tokens of all trajectories."""
        return int(self.length_N.sum())

    @property
    def num_children_S(self) -> NDArray[np.int64]:
        """[S] int64. Segments directly below each; two or more where paths part."""
        return np.bincount(self.parent_S[self.parent_S >= 0], minlength=self.parent_S.size)

    def restrict(self, trajectories: Sequence[int] | NDArray[np.int64]) -> PrefixTree:
        """The tree of some of the trajectories, without looking at tokens again.

        Args:
            trajectories: Numbers as in `order_N`, at least one, none twice, in any order.

        Returns:
            Equals the tree built from these trajectories alone, but `order_N` keeps their numbers in this tree.

        Raises:
            ValueError: If there is none, one is given twice, or one is not in the tree.

        Example:
            >>> tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])
            >>> tree.restrict([1, 0]).lcp_N.tolist()
            [0, 2]
        """
        wanted = np.asarray(trajectories, dtype=np.int64)
        if wanted.size == 0:
            raise ValueError("Got no trajectories to restrict the tree to, expected at least one.")
        member_N = np.isin(self.order_N, wanted)
        if member_N.sum() != wanted.size:
            numbers, counts = np.unique(wanted, return_counts=True)
            bad = numbers[(counts > 1) | ~np.isin(numbers, self.order_N)]
            raise ValueError(
                f"Trajectories {bad[:10].tolist()} are given twice or are not in the tree. "
                "Name trajectories of order_N, each once."
            )
        position = np.flatnonzero(member_N)
        # Two trajectories share as much as the least of the neighbours' common prefixes between them.
        lcp_N = np.zeros(position.size, dtype=np.int64)
        if position.size > 1:
            lcp_N[1:] = np.minimum.reduceat(self.lcp_N[: position[-1] + 1], position[:-1] + 1)
        return tree_from_lcp(self.order_N[position], self.length_N[position], lcp_N)

    def largest_first(self) -> PrefixTree:
        """The same tree with the largest subtree first among siblings; of equals, the one that was first.

        Packed so, a token sees at most 1 + log2(T) runs of consecutive tokens: each further run costs a step to a
        sibling of a subtree at least as large. Kernels compute blocks of queries and keys, so fewer runs are less
        work at their edges.

        Returns:
            `order_N` is no longer lexicographic, but a trajectory still comes before those it begins. Time is
            linear in trajectories and, but for the sorting, in segments.

        Example (abcde, abxy and abcz; `ab` continues with the larger `c`):
            >>> tree_from_lcp([1, 0, 2], [3, 3, 5], [0, 1, 1]).largest_first().order_N.tolist()
            [2, 1, 0]
        """
        place_S = _places_largest_first(self)
        place_N = place_S[self.tail_N]
        order = np.argsort(place_N, kind="stable")
        start_by_place = np.empty_like(self.start_S)
        start_by_place[place_S] = self.start_S
        before, after = place_N[order[:-1]], place_N[order[1:]]
        # Segments are entered one after the other, so the first that is new is the next one.
        lcp_N = np.zeros_like(self.lcp_N)
        lcp_N[1:] = np.where(before == after, self.length_N[order[1:]], start_by_place[(before + 1) % place_S.size])
        return tree_from_lcp(self.order_N[order], self.length_N[order], lcp_N)


def _places_largest_first(tree: PrefixTree) -> NDArray[np.int64]:
    """[S] int64. Where each segment comes in pre-order with the largest subtree first among siblings."""
    parents = tree.parent_S.tolist()
    tokens, segments = (tree.end_S - tree.start_S).tolist(), [1] * len(parents)
    for segment in range(len(parents) - 1, -1, -1):
        if parents[segment] >= 0:
            tokens[parents[segment]] += tokens[segment]
            segments[parents[segment]] += segments[segment]
    places = [0] * len(parents)
    next_place = [0] * (len(parents) + 1)  # of the next child below each segment; last, of the next root
    # Parents come before their children here, and siblings in the order wanted.
    for segment in np.lexsort((-np.array(tokens), tree.start_S)).tolist():
        above = parents[segment]
        places[segment] = next_place[above]
        next_place[above] += segments[segment]
        next_place[segment] = places[segment] + 1
    return np.array(places, dtype=np.int64)


def build_prefix_tree(batch: TrajectoryBatch) -> PrefixTree:
    """Merge trajectories that start with the same tokens.

    Two trajectories share a token only while every token id and share key up to it is equal.

    Args:
        batch: The trajectories of a step.

    Returns:
        The tree whose path to `tail_N[i]` spells the first `length_N[i]` tokens of trajectory `order_N[i]`.

    Example:
        >>> from harts.data import Trajectory
        >>> tree = build_prefix_tree(TrajectoryBatch.of([Trajectory.of([1, 2, 3]), Trajectory.of([1, 2, 4])]))
        >>> tree.num_tokens, tree.num_trajectory_tokens
        (4, 6)
    """
    order_N, lcp_N = sort_with_lcp(batch)
    return tree_from_lcp(order_N, batch.length_N[order_N], lcp_N)


def tree_from_lcp(order_N: ArrayLike, length_N: ArrayLike, lcp_N: ArrayLike) -> PrefixTree:
    """Build the tree from the lengths of sorted trajectories and what neighbours share; tokens are not needed.

    Args:
        order_N: [N] int. Trajectory numbers in lexicographic order.
        length_N: [N] int, >= 1. Tokens of each.
        lcp_N: [N] int. Tokens shared with the one before; 0 for the first.

    Returns:
        The tree, in O(N).

    Raises:
        ValueError: If the arrays are empty, differ in size, or belong to no sorted list of trajectories.

    Example:
        >>> tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2]).parent_S.tolist()
        [-1, 0, 1, 1, 0]
    """
    from harts.tree.merge_sort import find_segments

    order_N, length_N, lcp_N = (np.asarray(values, dtype=np.int64) for values in (order_N, length_N, lcp_N))
    _check_lcp(order_N, length_N, lcp_N)
    parent_S, start_S, end_S, multiplicity_S, tail_N = find_segments(length_N, lcp_N)
    size_S = end_S - start_S
    return PrefixTree(
        order_N=order_N,
        length_N=length_N,
        lcp_N=lcp_N,
        parent_S=parent_S,
        start_S=start_S,
        end_S=end_S,
        offset_S=np.cumsum(size_S) - size_S,
        multiplicity_S=multiplicity_S,
        tail_N=tail_N,
    )


def _check_lcp(order_N: NDArray[np.int64], length_N: NDArray[np.int64], lcp_N: NDArray[np.int64]) -> None:
    if length_N.ndim != 1 or length_N.size == 0 or not order_N.shape == length_N.shape == lcp_N.shape:
        raise ValueError(
            f"Got order, length and lcp of shapes {order_N.shape}, {length_N.shape} and {lcp_N.shape}, "
            "expected one entry a trajectory in each, and at least one trajectory."
        )
    if length_N.min() < 1:
        raise ValueError(
            f"Length {length_N.min()} at place {length_N.argmin()}, expected at least 1. Remove empty trajectories."
        )
    if lcp_N[0] != 0:
        raise ValueError(f"lcp[0] is {lcp_N[0]}, expected 0: the first trajectory has none before it.")
    # As long as the whole trajectory, a common prefix must be all of the one before too, or that should sort later.
    limit_N = np.minimum(length_N[1:], length_N[:-1]) - (length_N[1:] < length_N[:-1])
    bad = np.flatnonzero((lcp_N[1:] < 0) | (lcp_N[1:] > limit_N)) + 1
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"lcp[{i}] is {lcp_N[i]} between trajectories of lengths {length_N[i - 1]} and {length_N[i]}, "
            f"expected 0 to {limit_N[i - 1]}. Sort the trajectories, a prefix before what it begins, "
            "and compare each with the one before."
        )
