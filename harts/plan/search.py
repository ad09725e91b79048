"""The planner proper: candidates from packing, annealing and the portfolio; the best of them, bounds and peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.plan import pack, portfolio
from harts.plan.bounds import LowerBound, lower_bound
from harts.plan.problem import Problem
from harts.plan.slots import Schedule, schedule

MAX_EXTRA_SLOTS = 2
"""Slots tried beyond the fewest that the token limit allows."""
FINE_TOLERANCE, COARSE_TOLERANCE = 2.0**-13, 2.0**-9
"""Steps of the bisection on the capacity, for few and for many jobs."""
FEW_JOBS = 5000
"""Up to so many jobs plans are annealed and capacities bisected finely."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Found:
    """The best schedule of a search."""

    schedule: Schedule
    """No member of the portfolio has a smaller makespan."""
    bound: LowerBound
    """Of every schedule."""
    peers: dict[str, int]
    """Makespan of each member of the portfolio, in units."""


def search(problem: Problem, *, seed: int) -> Found:
    """Find a schedule near the lower bound.

    Args:
        problem: As made by `make_problem`.
        seed: Of the annealing.
    """
    bound = lower_bound(problem)
    members = {name: schedule(problem, bin_J) for name, bin_J in _members(problem, bound)}
    candidates = [schedule(problem, bin_J) for bin_J in _packings(problem, bound)]
    best = min([*candidates, *members.values()], key=_rank)
    return Found(schedule=best, bound=bound, peers={name: member.makespan for name, member in members.items()})


def _rank(candidate: Schedule) -> tuple[int, int, int]:
    """Shorter first; of equals, the one with fewer slots, then less work."""
    return candidate.makespan, candidate.work_B.size, int(candidate.work_B.sum())


def _packings(problem: Problem, bound: LowerBound) -> Iterator[NDArray[np.int64]]:
    tokens_only = pack.pack_tokens(problem)
    yield tokens_only
    yield portfolio.least_work_cut(problem.length_J, problem.lcp_J, problem.path_D, problem.limit, problem.overhead)
    if problem.ranks == 1:
        return  # nothing to balance: the least work is the shortest
    fewest = -(-int(tokens_only.max() + 1) // problem.ranks)
    is_small = problem.num_jobs <= FEW_JOBS
    tolerance = FINE_TOLERANCE if is_small else COARSE_TOLERANCE
    best: int | None = None
    for num_slots in range(fewest, fewest + MAX_EXTRA_SLOTS + 1):
        reachable = bound.work + num_slots * problem.overhead
        if best is not None and best <= (reachable if is_small else reachable + reachable // 200):
            return
        for rule in (pack.FIRST_FIT, pack.WORST_FIT):
            packing = pack.pack_slots(problem, num_slots=num_slots, rule=rule, tolerance=tolerance)
            if packing is not None:
                best = packing.makespan if best is None else min(best, packing.makespan)
                yield packing.bin_J


def _members(problem: Problem, bound: LowerBound) -> Iterator[tuple[str, NDArray[np.int64]]]:
    greedy = portfolio.greedy_cut(problem)
    yield "greedy", greedy
    yield "whole_trees", portfolio.whole_trees(problem)
    fewest = -(-int(greedy.max() + 1) // problem.ranks)
    ranges = [portfolio.contiguous(problem, fewest + extra) for extra in range(MAX_EXTRA_SLOTS + 1)]
    yield "contiguous", min((r for r in ranges if r is not None), key=lambda r: schedule(problem, r).makespan)
    sequences = portfolio.balanced_sequences(problem)
    if sequences is not None:
        yield "sequences", sequences
