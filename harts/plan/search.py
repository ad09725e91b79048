"""The planner proper: candidates from packing, annealing and the portfolio; the best of them, bounds and peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.plan import pack, portfolio
from harts.plan.anneal import anneal
from harts.plan.bounds import LowerBound, lower_bound
from harts.plan.problem import Problem
from harts.plan.slots import Schedule, schedule

MAX_EXTRA_SLOTS = 2
"""Slots tried beyond the fewest that the token limit allows."""
FINE_TOLERANCE, COARSE_TOLERANCE = 2.0**-13, 2.0**-9
"""Steps of the bisection on the capacity, for few and for many jobs."""
FEW_JOBS = 5000
"""Up to so many jobs plans are annealed and capacities bisected finely."""


ANNEALED = 2
"""Candidates that are annealed."""
SPREADS = (0.0, 0.3)
"""Weights of the penalty on uneven microbatches, each of which is tried."""
MOVES_PER_JOB, MAX_MOVES = 1000, 1_000_000
"""Moves of one annealing."""
MAX_ANNEALED_CELLS = 4_000_000
"""Jobs x microbatches up to which is annealed; the counters take 4 bytes for each."""


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
    peers = {name: schedule(problem, bin_J) for name, bin_J in _members(problem)}
    candidates = list(peers.values())
    for bin_J in _compact(problem):
        candidates.append(schedule(problem, bin_J))
    if problem.ranks > 1:  # on one rank there is nothing to balance: the least work is the shortest
        fewest = min(candidate.num_slots for candidate in candidates)
        candidates += _balanced(problem, bound, fewest)
        if min(candidates, key=_order).makespan > bound.makespan:
            candidates += _annealed(problem, candidates, seed)
    return Found(
        schedule=min(candidates, key=_order),
        bound=bound,
        peers={name: peer.makespan for name, peer in peers.items()},
    )


def _order(candidate: Schedule) -> tuple[int, int, int]:
    """Shorter first; of equals, the one with fewer slots, then less work."""
    return candidate.makespan, candidate.num_slots, int(candidate.work_B.sum())


def _members(problem: Problem) -> Iterator[tuple[str, NDArray[np.int64]]]:
    greedy = portfolio.greedy_cut(problem)
    yield "greedy", greedy
    yield "whole_trees", portfolio.whole_trees(problem)
    yield "contiguous", portfolio.contiguous(problem, 1 + int(greedy[-1]) // problem.ranks)
    sequences = portfolio.balanced_sequences(problem)
    if sequences is not None:
        yield "sequences", sequences


def _compact(problem: Problem) -> Iterator[NDArray[np.int64]]:
    """Packings that only look for little work in few microbatches."""
    yield portfolio.least_work_cut(problem.length_J, problem.lcp_J, problem.path_D, problem.limit, problem.overhead)
    for rule in pack.RULES:
        yield pack.pack_tokens(problem, rule=rule)


def _balanced(problem: Problem, bound: LowerBound, fewest: int) -> Iterator[Schedule]:
    """Packings into a few numbers of slots from the fewest on."""
    is_small = problem.num_jobs <= FEW_JOBS
    tolerance = FINE_TOLERANCE if is_small else COARSE_TOLERANCE
    best = 0
    for num_slots in range(fewest, fewest + MAX_EXTRA_SLOTS + 1):
        reachable = bound.work + num_slots * problem.overhead
        if 0 < best <= (reachable if is_small else reachable + reachable // 200):
            return
        for rule in pack.RULES:
            bin_J = pack.pack_slots(problem, num_slots=num_slots, rule=rule, tolerance=tolerance)
            if bin_J is not None:
                packed = schedule(problem, bin_J)
                best = min(best or packed.makespan, packed.makespan)
                yield packed


def _annealed(problem: Problem, candidates: list[Schedule], seed: int) -> Iterator[Schedule]:
    """The best candidates of different numbers of slots, improved."""
    starts: dict[int, Schedule] = {}
    for candidate in sorted(candidates, key=_order):
        starts.setdefault(candidate.num_slots, candidate)
    for start in list(starts.values())[:ANNEALED]:
        if problem.num_jobs > FEW_JOBS or problem.num_jobs * start.work_B.size > MAX_ANNEALED_CELLS:
            continue
        # Annealing counts on microbatch b being on rank b % ranks.
        number_B = start.places.slot_B * problem.ranks + start.places.rank_B
        for spread in SPREADS:
            bin_J = anneal(
                problem,
                number_B[start.bin_J],
                num_bins=number_B.size,
                moves=min(MAX_MOVES, MOVES_PER_JOB * problem.num_jobs),
                seed=seed,
                spread=spread,
            )
            yield schedule(problem, portfolio.close_gaps(bin_J))
