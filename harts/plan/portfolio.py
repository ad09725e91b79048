"""Plans as other systems make them: members of the portfolio that a plan is never worse than.

All get this package's treatment of what they leave open: jobs only (so duplicates cost them nothing either), work of
the trie in every microbatch, and the best slots for their microbatches.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.differencing import differencing
from harts.plan.problem import Problem

SEQUENCE_WORK = 24576
"""Of a token in the linear part of verl's workload, 24576 L + L^2."""
MAX_DIFFERENCING = 300_000
"""Jobs x parts up to which sequences are balanced by differencing; its time and memory grow with them."""


def greedy_cut(problem: Problem) -> NDArray[np.int64]:
    """[J] int64, bins cut from the lexicographic order as late as the token limit allows: the fewest of this order."""
    identity_D = np.arange(problem.path_D.size)
    return _cut(problem.length_J, problem.lcp_J, identity_D, problem.limit, identity_D[-1] * problem.num_jobs + 1)


def contiguous(problem: Problem, num_slots: int) -> NDArray[np.int64]:
    """Ranges of the lexicographic order with the least possible maximum of work, as in AReaL-DTA.

    Args:
        problem: The jobs.
        num_slots: Ranges there may be, by rank; at least as many as a greedy cut makes.

    Returns:
        [J] int64, bins.
    """
    most = num_slots * problem.ranks
    low, high = 0, int(problem.path_D[problem.length_J].sum())
    arrays = (problem.length_J, problem.lcp_J, problem.path_D, problem.limit)
    best = _cut(*arrays, high)
    assert best[-1] < most, "a greedy cut makes the fewest ranges"
    while high - low > 1 + (high >> 12):
        capacity = (low + high) // 2
        bin_J = _cut(*arrays, capacity)
        if bin_J[-1] < most:
            best, high = bin_J, capacity
        else:
            low = capacity
    return best


@numba.njit(cache=True)
def _cut(length_J, lcp_J, path_D, limit, capacity):
    """Cut the order as late as token limit and capacity allow; a job of more than the capacity stays alone."""
    bin_J = np.zeros(length_J.size, dtype=np.int64)
    tokens, work, number = length_J[0], path_D[length_J[0]], 0
    for job in range(1, length_J.size):
        tokens += length_J[job] - lcp_J[job]
        work += path_D[length_J[job]] - path_D[lcp_J[job]]
        if tokens > limit or work > capacity:
            tokens, work, number = length_J[job], path_D[length_J[job]], number + 1
        bin_J[job] = number
    return bin_J


def whole_trees(problem: Problem) -> NDArray[np.int64]:
    """[J] int64, bins of whole trees (cut only at the token limit), the largest first to the least loaded bin."""
    # Trees are the stretches without a common prefix; a cut at the token limit makes a further piece.
    starts_J = problem.lcp_J == 0
    length_J, lcp_J = problem.length_J, problem.lcp_J
    identity_D = np.arange(problem.path_D.size)
    piece_J = _cut_trees(length_J, lcp_J, starts_J, problem.limit)
    count = int(piece_J[-1]) + 1
    first_J = np.diff(piece_J, prepend=-1) > 0
    held_J = np.where(first_J, 0, lcp_J)
    work, tokens = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(work, piece_J, problem.path_D[length_J] - problem.path_D[held_J])
    np.add.at(tokens, piece_J, identity_D[length_J] - held_J)
    num_slots = max(1, -(-int(tokens.sum()) // (problem.limit * problem.ranks)))
    order = np.argsort(-work, kind="stable")
    while True:
        bin_of_piece = _least_loaded(order, work, tokens, num_slots * problem.ranks, problem.limit)
        if bin_of_piece.size:
            return close_gaps(bin_of_piece[piece_J])
        num_slots += 1 + num_slots // 32


@numba.njit(cache=True)
def least_work_cut(length_J, lcp_J, path_D, limit, overhead):
    """[J] int64, bins cut from the lexicographic order with the least sum of work and overheads, in O(J).

    A cut before a job repeats the prefix that it shares with the job before.
    """
    count = length_J.size
    total_J = np.cumsum(length_J - lcp_J)
    least_J = np.zeros(count + 1, dtype=np.int64)  # of cuts up to and including the one before each job
    from_J = np.zeros(count + 1, dtype=np.int64)  # where the bin before that cut begins
    window = np.zeros(count + 1, dtype=np.int64)  # begins that may still be best, by ascending cost
    first, last = 0, 1
    for job in range(1, count + 1):
        while total_J[job - 1] - total_J[window[first]] + length_J[window[first]] > limit:
            first += 1
        from_J[job] = window[first]
        repeated = path_D[lcp_J[job]] if job < count else 0
        least_J[job] = least_J[window[first]] + repeated + overhead
        while last > first and least_J[window[last - 1]] > least_J[job]:
            last -= 1
        window[last] = job
        last += 1
    starts_J = np.zeros(count, dtype=np.int64)
    job = from_J[count]
    while job > 0:
        starts_J[job] = 1
        job = from_J[job]
    return np.cumsum(starts_J)


@numba.njit(cache=True)
def _cut_trees(length_J, lcp_J, starts_J, limit):
    piece_J = np.zeros(length_J.size, dtype=np.int64)
    tokens, number = length_J[0], 0
    for job in range(1, length_J.size):
        tokens += length_J[job] - lcp_J[job]
        if starts_J[job] or tokens > limit:
            tokens, number = length_J[job], number + 1
        piece_J[job] = number
    return piece_J


@numba.njit(cache=True)
def _least_loaded(order, work, tokens, bins, limit):
    """Bin of each item, in the order given to the least loaded bin with room; empty if one has no room."""
    held, bin_of = np.zeros(bins, dtype=np.int64), np.empty(order.size, dtype=np.int64)
    queue = [(np.int64(0), index) for index in range(bins)]  # by load; ascending, so a heap
    for item in order:
        full = [(np.int64(0), 0) for _ in range(0)]
        while queue and held[queue[0][1]] + tokens[item] > limit:
            full.append(heapq.heappop(queue))
        if not queue:
            return np.empty(0, dtype=np.int64)
        load, best = queue[0]
        held[best] += tokens[item]
        bin_of[item] = best
        heapq.heapreplace(queue, (load + work[item], best))
        for entry in full:
            heapq.heappush(queue, entry)
    return bin_of


def balanced_sequences(problem: Problem) -> NDArray[np.int64] | None:
    """Sequences dealt to ranks, and those of each rank to microbatches, by Karmarkar-Karp on their length, as in verl.

    Nothing in the choice knows of sharing.

    Returns:
        [J] int64, bins; None if there are more than `MAX_DIFFERENCING` jobs x ranks or jobs of a rank x slots.
    """
    length_J = problem.length_J
    slots = -(-int(length_J.sum()) // (problem.limit * problem.ranks))
    if problem.num_jobs * max(problem.ranks, slots // problem.ranks + 1) > MAX_DIFFERENCING:
        return None
    load_J = SEQUENCE_WORK * length_J + length_J * length_J
    rank_J = differencing(load_J, problem.ranks)
    on_rank = [np.flatnonzero(rank_J == rank) for rank in range(problem.ranks)]
    num_slots = max(1, *(-(-int(length_J[jobs].sum()) // problem.limit) for jobs in on_rank))
    while True:
        bin_J = np.empty_like(length_J)
        for rank, jobs in enumerate(on_rank):
            bin_J[jobs] = rank * num_slots + differencing(load_J[jobs], num_slots)
        if _most_tokens(length_J, bin_J, num_slots * problem.ranks) <= problem.limit:
            return close_gaps(bin_J)
        num_slots += 1 + num_slots // 16


def _most_tokens(length_J: NDArray[np.int64], bin_J: NDArray[np.int64], count: int) -> int:
    tokens_B = np.zeros(count, dtype=np.int64)
    np.add.at(tokens_B, bin_J, length_J)
    return int(tokens_B.max())


def close_gaps(bin_J: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same bins, numbered from 0 without gaps."""
    is_used_B = np.zeros(int(bin_J.max()) + 1, dtype=bool)
    is_used_B[bin_J] = True
    return (np.cumsum(is_used_B) - 1)[bin_J]
