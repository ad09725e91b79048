"""From microbatches to slots of ranks, and what a step of them takes.

With a barrier after every slot the step takes the sum over slots of the slowest rank. For given microbatches that is
least when they are sorted by work and cut into groups of one a rank: whatever the slots, the largest of the s-th
heaviest slot is at least the ((s - 1) ranks + 1)-th heaviest microbatch. So a planner only chooses the microbatches.
Without a barrier the step takes the largest sum of a rank, and microbatches are dealt to the least loaded rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Places:
    """A rank and a slot for each microbatch, all different, as many slots on every rank."""

    rank_B: NDArray[np.int64]
    """[B] int64."""
    slot_B: NDArray[np.int64]
    """[B] int64."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Schedule:
    """Jobs in microbatches, microbatches in slots of ranks."""

    bin_J: NDArray[np.int64]
    """[J] int64. Microbatch of each job."""
    work_B: NDArray[np.int64]
    """[B] int64, units. Work of each microbatch; B is a multiple of the ranks."""
    places: Places
    """Of the microbatches."""
    makespan: int
    """Units, slot overheads included."""

    @property
    def num_slots(self) -> int:
        """Slots of each rank."""
        return int(self.places.slot_B.max()) + 1


def schedule(problem: Problem, bin_J: NDArray[np.int64]) -> Schedule:
    """Give microbatches their ranks and slots.

    Ranks have equal numbers of slots. Where microbatches are missing, the smallest job of a microbatch of several
    becomes one of its own; only if there are too few jobs do microbatches stay empty.

    Args:
        problem: As made by `make_problem`.
        bin_J: [J] int64. Microbatch of each job, numbered from 0 without gaps, each within the token limit.
    """
    count = int(bin_J.max()) + 1
    num_slots = -(-count // problem.ranks)
    if count < num_slots * problem.ranks:
        bin_J = _pad(bin_J, problem.shortest_J, count, num_slots * problem.ranks)
    work_B = np.zeros(num_slots * problem.ranks, dtype=np.int64)
    work, _ = recount(problem, bin_J)
    work_B[: work.size] = work
    places = place(work_B, ranks=problem.ranks, barrier=problem.barrier)
    work_RS = np.empty((problem.ranks, num_slots), dtype=np.int64)
    work_RS[places.rank_B, places.slot_B] = work_B
    height = work_RS.max(axis=0).sum() if problem.barrier else work_RS.sum(axis=1).max()
    makespan = int(height) + num_slots * problem.overhead
    return Schedule(bin_J=bin_J, work_B=work_B, places=places, makespan=makespan)


def place(work_B: NDArray[np.integer | np.floating], *, ranks: int, barrier: bool) -> Places:
    """Give microbatches ranks and slots.

    Args:
        work_B: [B]. Work of each; B is a multiple of `ranks`.
        ranks: >= 1.
        barrier: Whether ranks wait for each other after every slot.

    Returns:
        With barriers, the places of least makespan for these microbatches.
    """
    heaviest_B = np.argsort(-work_B, kind="stable")
    if not barrier:
        return _deal(work_B.tolist(), heaviest_B.tolist(), ranks)
    rank_B, slot_B = np.empty(work_B.size, dtype=np.int64), np.empty(work_B.size, dtype=np.int64)
    slot_B[heaviest_B], rank_B[heaviest_B] = np.divmod(np.arange(work_B.size), ranks)
    return Places(rank_B=rank_B, slot_B=slot_B)


def recount(problem: Problem, bin_J: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Work (units) and distinct tokens of each microbatch, counted from the tries of its jobs."""
    count = int(bin_J.max()) + 1
    lcp_J = shared_in_bins(problem.parent_S, problem.end_S, problem.tail_J, bin_J)
    work_B, tokens_B = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(work_B, bin_J, problem.path_D[problem.length_J] - problem.path_D[lcp_J])
    np.add.at(tokens_B, bin_J, problem.length_J - lcp_J)
    return work_B, tokens_B


@numba.njit(cache=True)
def by_bin(bin_J):
    """Jobs, microbatch by microbatch, in lexicographic order within each."""
    count = bin_J.max() + 1
    end_B = np.zeros(count + 1, dtype=np.int64)
    for number in bin_J:
        end_B[number + 1] += 1
    for number in range(count):
        end_B[number + 1] += end_B[number]
    order_J = np.empty(bin_J.size, dtype=np.int64)
    for job in range(bin_J.size):
        order_J[end_B[bin_J[job]]] = job
        end_B[bin_J[job]] += 1
    return order_J


@numba.njit(cache=True)
def shared_in_bins(parent_S, end_S, tail_J, bin_J):
    """Tokens that each job shares with the jobs before it in its microbatch.

    Args:
        parent_S: [S] int64, as in `PrefixTree`.
        end_S: [S] int64, as in `PrefixTree`.
        tail_J: [J] int64. Segment of each job's last token.
        bin_J: [J] int64. Microbatch of each job.
    """
    seen_S = np.full(parent_S.size, -1, dtype=np.int64)  # the last microbatch that came through
    lcp_J = np.zeros(tail_J.size, dtype=np.int64)
    for job in by_bin(bin_J):
        segment = tail_J[job]
        while segment >= 0 and seen_S[segment] != bin_J[job]:
            seen_S[segment] = bin_J[job]
            segment = parent_S[segment]
        lcp_J[job] = end_S[segment] if segment >= 0 else 0
    return lcp_J


@numba.njit(cache=True)
def _pad(bin_J, shortest_J, count, wanted):
    """Split microbatches until there are as many as wanted, or as jobs."""
    bin_J = bin_J.copy()
    jobs_B = np.zeros(count, dtype=np.int64)
    for number in bin_J:
        jobs_B[number] += 1
    for job in shortest_J:
        if count >= wanted:
            break
        if jobs_B[bin_J[job]] > 1:
            jobs_B[bin_J[job]] -= 1
            bin_J[job] = count
            count += 1
    return bin_J


def _deal(works: list[float], heaviest: list[int], ranks: int) -> Places:
    """The heaviest first, each to the rank with the least work that has a free slot."""
    rank_B, slot_B = np.empty(len(works), dtype=np.int64), np.empty(len(works), dtype=np.int64)
    queue: list[tuple[float, int, int]] = [(0, rank, 0) for rank in range(ranks)]
    for number in heaviest:
        load, rank, slot = heapq.heappop(queue)
        rank_B[number], slot_B[number] = rank, slot
        if slot + 1 < len(works) // ranks:
            heapq.heappush(queue, (load + works[number], rank, slot + 1))
    return Places(rank_B=rank_B, slot_B=slot_B)
