"""Which rank runs which column of a plan. Ranks are interchangeable, so each gets what it holds most of already.

All ranks know the tree and who holds what, so each finds the same without telling the others anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numba
import numpy as np
from numpy.typing import NDArray

from harts.data.ragged import ranges
from harts.plan.assignment import assign_best, assign_greedily
from harts.plan.plan import Plan
from harts.tree import PrefixTree

EXACT_RANKS = 512
"""Up to so many ranks the best of all assignments is found; for more, the heaviest pairs are taken one by one."""
MOST_PAIRS = 64
"""Of more ranks, what so many pairs of a column and a rank have in common is not counted: it tells few apart."""
PAIRS_AT_ONCE = 2**20
"""Pairs that are added up at a time, but for those of a single segment."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holdings:
    """Where a step's trajectories are, and what it takes to move them."""

    rank_N: NDArray[np.int64]
    """[N] int64, by number. Rank that holds each trajectory."""
    bits_N: NDArray[np.int64]
    """[N] int64, by number, >= 0. What travels with each trajectory that moves, beside its tokens."""
    bits_per_token: int
    """What travels for each token that the receiver does not hold, however many trajectories have it."""


def run_where_held(plan: Plan, tree: PrefixTree, holdings: Holdings) -> Plan:
    """Number the ranks of a plan anew, so that few bits have to move.

    A rank receives each distinct token of its column that it does not hold, and what goes with every trajectory that it
    does not hold. Up to `EXACT_RANKS` no other numbering of the plan's ranks moves fewer bits.

    Args:
        plan: For the tree, of all ranks.
        tree: Of the step.
        holdings: Of all ranks.

    Returns:
        The plan with its columns in another order, and so with the same makespan.

    Example:
        >>> from harts.plan import CostModel, make_plan
        >>> from harts.tree import tree_from_lcp
        >>> tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])  # abc, abcde, abcz, abxy
        >>> cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
        >>> plan = make_plan(tree, max_tokens_per_microbatch=6, cost=cost, ranks=2, barrier=False)
        >>> running_ranks(plan).tolist()
        [0, 1, 0, 0]
        >>> rank_N, bits_N = np.array([1, 0, 1, 1]), np.zeros(4, dtype=np.int64)
        >>> near = run_where_held(plan, tree, Holdings(rank_N=rank_N, bits_N=bits_N, bits_per_token=32))
        >>> running_ranks(near).tolist()
        [1, 0, 1, 1]
    """
    column_N = running_ranks(plan)
    if plan.ranks <= EXACT_RANKS:
        weight_CR = np.zeros(plan.ranks**2, dtype=np.int64)
        for pair, bits in bits_in_common(tree, column_N, holdings, shape=(plan.ranks, plan.ranks)):
            np.add.at(weight_CR, pair, bits)
        rank_C = assign_best(weight_CR.reshape(plan.ranks, plan.ranks))
    else:
        found = bits_in_common(tree, column_N, holdings, shape=(plan.ranks, plan.ranks), most_pairs=MOST_PAIRS)
        pairs, bits = zip(*found, strict=True)
        pair_Q, place = np.unique(np.concatenate(pairs), return_inverse=True)
        heaviest_Q = np.argsort(-np.bincount(place, weights=np.concatenate(bits)), kind="stable")
        rank_C = assign_greedily(*np.divmod(pair_Q[heaviest_Q], plan.ranks), plan.ranks)
    return replace(plan, slots=tuple(plan.slots[column] for column in np.argsort(rank_C).tolist()))


def running_ranks(plan: Plan) -> NDArray[np.int64]:
    """[N] int64, by number. Rank that runs each trajectory of a plan."""
    members = [[number for microbatch in rank for number in microbatch.trajectories] for rank in plan.slots]
    target_N = np.empty(sum(map(len, members)), dtype=np.int64)
    for rank, numbers in enumerate(members):
        target_N[numbers] = rank
    return target_N


def bits_in_common(
    tree: PrefixTree,
    part_N: NDArray[np.int64],
    holdings: Holdings,
    *,
    shape: tuple[int, int],
    most_pairs: int | None = None,
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """What a rank need not receive of a part of the step, because it has it; but for what is the same for all parts or
    for all ranks.

    Args:
        tree: Of the step.
        part_N: [N] int64, by number. Part of each trajectory, such as a column of a plan.
        holdings: Of all ranks.
        shape: How many parts and ranks there are.
        most_pairs: Leave out tokens that more pairs of a part and a rank have in common. None counts all.

    Yields:
        Pairs, as `part * ranks + rank`, and bits that add up, both [Q] int64.
    """
    num_parts, ranks = shape
    yield part_N * ranks + holdings.rank_N, holdings.bits_N
    part_I, part_offsets = _parts_of_segments(tree, part_N[tree.order_N])
    rank_I, rank_offsets = _parts_of_segments(tree, holdings.rank_N[tree.order_N])
    parts_S, ranks_S = np.diff(part_offsets), np.diff(rank_offsets)
    pairs_S = parts_S * ranks_S
    is_counted_S = (parts_S < num_parts) & (ranks_S < ranks)
    if most_pairs is not None:
        is_counted_S &= pairs_S <= most_pairs
    counted = np.flatnonzero(is_counted_S)
    bits_S = holdings.bits_per_token * (tree.end_S - tree.start_S)
    ends = np.cumsum(pairs_S[counted])
    for some in np.split(counted, np.flatnonzero(np.diff(ends // PAIRS_AT_ONCE)) + 1):
        # Each part of a segment, as often as ranks hold the segment, beside those ranks.
        each = ranges(part_offsets[some], parts_S[some])
        segment = np.repeat(some, parts_S[some])
        held = rank_I[ranges(rank_offsets[segment], ranks_S[segment])]
        yield np.repeat(part_I[each], ranks_S[segment]) * ranks + held, np.repeat(bits_S[segment], ranks_S[segment])


def _parts_of_segments(tree: PrefixTree, part_N: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The parts whose trajectories run through each segment, segment by segment, and offsets; `part_N` is in the
    tree's order."""
    segment_I, part_I = _walk(tree.parent_S, tree.tail_N, part_N, np.argsort(part_N, kind="stable"))
    counts = np.bincount(segment_I, minlength=tree.parent_S.size)
    return part_I[np.argsort(segment_I, kind="stable")], np.concatenate([[0], np.cumsum(counts)])


@numba.njit(cache=True)
def _walk(parent_S, tail_N, part_N, order_N):
    """Segments of every part, each once a part; `order_N` has the trajectories part by part."""
    segments, parts = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
    seen_S = np.full(parent_S.size, -1, dtype=np.int64)
    for i in order_N:
        segment = tail_N[i]
        while segment >= 0 and seen_S[segment] != part_N[i]:
            seen_S[segment] = part_N[i]
            segments.append(segment)
            parts.append(part_N[i])
            segment = parent_S[segment]
    return np.array(segments), np.array(parts)
