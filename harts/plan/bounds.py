"""What no plan can beat.

Every rank computes at least the trie of all its jobs, and a branch point with more below it than one rank (or one
microbatch) can hold is computed by several. Counting, from the leaves up, by how many at least gives the work that
all ranks have to do together. A slot that holds the longest trajectory takes as long as that one, whatever else it
holds, and the rest has to be done in other slots. `harts.plan.prices` finds what no count sees: that few large parts
do not fill slots evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from harts.plan.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowerBound:
    """Bounds in units of work."""

    work: int
    """Of the sum of the slots' heights, or of the largest rank's work without barriers; no overheads."""
    slots: int
    """Of the number of slots."""
    makespan: int
    """Of the makespan: both together."""


def lower_bound(problem: Problem) -> LowerBound:
    """Bound the makespan of every plan from below, in near-linear time.

    Args:
        problem: As made by `make_problem`.

    Returns:
        Bounds that hold for any microbatches within the token limit and any slots, slots of empty microbatches
        included.
    """
    own_S = problem.own_S
    count_S, duplicated = _fewest_bins(problem.parent_S, problem.end_S, problem.size_S, problem.limit)
    slots = -(-max(int(count_S.max()), -(-int(duplicated) // problem.limit)) // problem.ranks)
    work_end_S = problem.path_D[problem.end_S]
    longest = int(work_end_S.max())
    if problem.barrier and np.count_nonzero(problem.parent_S < 0) == 1:
        # A slot takes as long as if each of its microbatches, the empty ones too, held the prefix that all share.
        count_S[0] = slots * problem.ranks
    capacity = max(longest, -(-problem.total_work // problem.ranks))
    low, high, before = capacity - 1, int(work_end_S.sum()), 0  # too small; as large as if nothing was shared
    # Less capacity is more to do. If an even share of what there is to do is more than a capacity, that capacity is too
    # small and the share is not; if it is not more, whatever is less than the share is too small.
    while high - low > 1 + (high >> 20):
        total = _least_total(problem.parent_S, work_end_S, own_S, count_S, capacity)
        share = -(-total // problem.ranks)
        low = max(low, capacity if share > capacity else share - 1)
        high = min(high, max(share, capacity))
        following = share if share > low and share not in (before, capacity) else (low + high) // 2
        before, capacity = capacity, following
    work = low + 1
    if problem.barrier:
        rest = problem.total_work - _densest(problem, problem.ranks * problem.limit)
        work = max(work, longest + -(-rest // problem.ranks))
    return LowerBound(work=work, slots=slots, makespan=work + slots * problem.overhead)


@numba.njit(cache=True)
def _fewest_bins(parent_S, end_S, own_S, capacity):
    """How many bins at least touch each segment, and how much at least all bins hold.

    A bin that touches a segment holds the path to its end, and has `capacity - end` left for what is below.
    """
    below_S = np.zeros(parent_S.size, dtype=np.int64)  # at least in all bins, strictly below each segment
    count_S = np.ones(parent_S.size, dtype=np.int64)  # starts as the most of any child
    total = 0
    for segment in range(parent_S.size - 1, -1, -1):
        if below_S[segment] > 0:
            free = capacity - end_S[segment]
            count_S[segment] = max(count_S[segment], (below_S[segment] + free - 1) // free)
        held = below_S[segment] + own_S[segment] * count_S[segment]
        parent = parent_S[segment]
        if parent >= 0:
            below_S[parent] += held
            count_S[parent] = max(count_S[parent], count_S[segment])
        else:
            total += held
    return count_S, total


@numba.njit(cache=True)
def _least_total(parent_S, end_S, own_S, other_S, capacity):
    """Work that all ranks do at least, if none does more than `capacity` and each segment is computed by at least
    `other_S` microbatches."""
    count_S, _ = _fewest_bins(parent_S, end_S, own_S, capacity)
    total = 0
    for segment in range(parent_S.size):
        total += own_S[segment] * max(count_S[segment], other_S[segment])
    return total


def _densest(problem: Problem, tokens: int) -> int:
    """Work of the distinct tokens that cost most, as many as given."""
    longest = problem.path_D.size - 1
    change_D = np.bincount(problem.end_S - problem.size_S, minlength=longest + 1)
    change_D = change_D - np.bincount(problem.end_S, minlength=longest + 1)
    tokens_D = np.cumsum(change_D)[:-1]  # distinct tokens at each depth
    work_D = np.diff(problem.path_D)
    order = np.argsort(-work_D, kind="stable")
    before = np.cumsum(tokens_D[order]) - tokens_D[order]
    taken = np.clip(tokens - before, 0, tokens_D[order])
    return int((taken * work_D[order]).sum())
