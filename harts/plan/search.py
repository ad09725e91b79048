"""The planner proper: candidates from packing, annealing and the portfolio; the best of them, bounds and peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harts.plan import capacity, portfolio
from harts.plan.anneal import Style, anneal, level
from harts.plan.bounds import LowerBound, lower_bound
from harts.plan.fill import fill_evenly
from harts.plan.pack import FIT_RULES
from harts.plan.prices import priced_bound
from harts.plan.problem import Problem
from harts.plan.slots import Schedule, schedule

MAX_EXTRA_SLOTS = 2
"""Slots tried beyond the fewest that the token limit allows."""
FINE_TOLERANCE, COARSE_TOLERANCE, BEAM_TOLERANCE = 2.0**-13, 2.0**-9, 2.0**-7
"""Steps of the search for a capacity: for few jobs, for many, and for many by the beam, which takes longest."""
FEW_JOBS = 5000
"""Up to so many jobs plans are annealed and capacities bisected finely."""
BEAM_JOBS = 1000
"""From so many jobs on packings with alternatives are tried. Annealing finds as short plans for fewer."""
FILL_CAPACITIES = (1.4, 1.25, 1.15)
"""Where plans are not annealed, bins of so much work are packed to fill slots with their parts. In units of the work of
as many tokens as the limit: less cuts trees that could stay whole, more leaves a few large parts that nothing evens."""
NEAR = 1.015
"""Not if a plan is as near to the bound as this: what a large step is to reach."""

FEWER_ATTEMPTS = 2
"""Annealings that look for a plan with a slot less than the best has."""
STYLES = EVEN, COOL, HOT = Style(0.5, 0.3, 1.0, 0.6), Style(0.5, 0.0, 0.3), Style(1.0, 0.0)
"""Ways to anneal, each of which is tried; the first is best at keeping the token limit."""
HANDFUL, STRICT = 50, (Style(0.5, 0.0, 0.1, 1e6), Style(0.5, 0.3, 0.1, 1e6))
"""Up to so many jobs these are tried as well, at every number of slots: they keep the limit and care less for work."""
REPEATS, WARM = 3, Style(0.2, 0.0, 0.3)
"""The best plan is annealed and leveled again so often, from a temperature that does not lose it."""
MOVES_PER_JOB, MIN_MOVES, MAX_MOVES = 2000, 60_000, 1_000_000
"""Moves of the longest annealing."""
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
    # Where one microbatch holds all, nothing is shorter, and the rest of the planner need not be compiled.
    if problem.ranks * min(candidate.num_slots for candidate in candidates) > 1:
        candidates += _packed(problem, candidates, bound)
    is_small = problem.num_jobs <= FEW_JOBS
    if not is_small and min(candidate.makespan for candidate in candidates) > NEAR * bound.makespan:
        candidates += _packed_by_beam(problem, bound)
    reached = min(candidate.makespan for candidate in candidates)
    if problem.ranks > 1 and reached > bound.makespan:  # on one rank there is nothing to balance
        if is_small and problem.barrier:
            bound = replace(bound, makespan=priced_bound(problem, known=bound.makespan, reached=reached))
        if is_small and reached > bound.makespan:
            candidates += _annealed(problem, candidates, bound, seed)
    return Found(
        schedule=min(candidates, key=_order),
        bound=bound,
        peers={name: peer.makespan for name, peer in peers.items()},
    )


def _packed(problem: Problem, peers: list[Schedule], bound: LowerBound) -> list[Schedule]:
    """Packings with little work, and on several ranks even ones."""
    cut = portfolio.least_work_cut(problem.length_J, problem.lcp_J, problem.path_D, problem.limit, problem.overhead)
    extra, tolerance = (MAX_EXTRA_SLOTS, FINE_TOLERANCE) if problem.num_jobs <= FEW_JOBS else (1, COARSE_TOLERANCE)
    rules = capacity.RULES if BEAM_JOBS <= problem.num_jobs <= FEW_JOBS else FIT_RULES
    by_rule = {rule: schedule(problem, capacity.pack_tokens(problem, rule=rule)) for rule in rules}
    packed = [schedule(problem, cut), *by_rule.values()]
    if problem.ranks > 1:
        fewest = min(candidate.num_slots for candidate in (*peers, *packed))
        packed += _balanced(problem, bound, by_rule, (range(fewest, fewest + extra + 1), tolerance))
    return packed


def _packed_by_beam(problem: Problem, bound: LowerBound) -> Iterator[Schedule]:
    """Packings of many jobs that keep alternatives."""
    if problem.barrier and problem.ranks > 1 and 2 * problem.largest_tree < problem.total_work:
        yield from _filled(problem)
        return
    packed = schedule(problem, capacity.pack_tokens(problem, rule=capacity.BEAM))
    yield packed
    if problem.ranks > 1:
        yield from _balanced(problem, bound, {capacity.BEAM: packed}, ((packed.num_slots,), BEAM_TOLERANCE))


def _order(candidate: Schedule) -> tuple[int, int, int, float]:
    """Shorter first; of equals, the one with fewer slots, then less work, then the more even one."""
    work_SR = np.sort(candidate.work_B)[::-1].reshape(candidate.num_slots, -1)
    mean_S = np.maximum(work_SR.sum(axis=1), 1) / work_SR.shape[1]
    excess = (work_SR[:, 0] / mean_S - 1).tolist()
    # Rounded once, so that all machines choose the same.
    unevenness = math.fsum(x * x * x * x for x in excess)
    return candidate.makespan, candidate.num_slots, int(candidate.work_B.sum()), unevenness


def _members(problem: Problem) -> Iterator[tuple[str, NDArray[np.int64]]]:
    greedy = portfolio.greedy_cut(problem)
    yield "greedy", greedy
    yield "whole_trees", portfolio.whole_trees(problem)
    yield "contiguous", portfolio.contiguous(problem, 1 + int(greedy[-1]) // problem.ranks)
    sequences = portfolio.balanced_sequences(problem)
    if sequences is not None:
        yield "sequences", sequences


def _balanced(
    problem: Problem,
    bound: LowerBound,
    by_rule: dict[int, Schedule],
    how: tuple[Iterable[int], float],
) -> Iterator[Schedule]:
    """Packings into a few numbers of slots, by the rules that need no more under the limit alone.

    Args:
        problem: The jobs.
        bound: Of every plan.
        by_rule: Packings under the limit alone.
        how: Numbers of slots, and the tolerance of the search for a capacity.
    """
    numbers, tolerance = how
    best = 0
    for num_slots in numbers:
        if 0 < best <= bound.work + num_slots * problem.overhead:
            return
        for rule, packed in by_rule.items():
            if num_slots < packed.num_slots:
                continue
            guess = bound.work // num_slots
            bin_J = capacity.pack_slots(problem, num_slots=num_slots, guess=guess, rule=rule, tolerance=tolerance)
            if bin_J is not None:
                balanced = schedule(problem, bin_J)
                best = min(best or balanced.makespan, balanced.makespan)
                yield balanced


def _filled(problem: Problem) -> Iterator[Schedule]:
    """Packings whose parts of trees fill slots anew."""
    full = capacity.full_bin(problem)
    for share in FILL_CAPACITIES:
        bin_J = fill_evenly(problem, capacity.pack_capacity(problem, int(share * full), rule=capacity.BEAM))
        if bin_J is not None:
            yield schedule(problem, portfolio.close_gaps(bin_J))


def _annealed(problem: Problem, candidates: list[Schedule], bound: LowerBound, seed: int) -> Iterator[Schedule]:
    """The best candidates of different numbers of slots, annealed shortly; then the best of these at length."""
    starts: dict[int, Schedule] = {}
    for candidate in sorted(candidates, key=_order):
        starts.setdefault(candidate.num_slots, candidate)
    best = next(iter(starts.values()))
    moves = max(MIN_MOVES, min(MAX_MOVES, MOVES_PER_JOB * problem.num_jobs))
    tried: list[tuple[Schedule, Style]] = []
    # Packing never tries fewer slots than it needs to keep the limit; annealing may pass through plans that break it.
    fewer: Schedule | None = best
    while fewer is not None and _is_promising(problem, bound, fewer.num_slots - 1, best):
        num_bins = (fewer.num_slots - 1) * problem.ranks
        start = min([fewer, *candidates], key=lambda candidate: _work_beyond(candidate, num_bins))
        num_slots, fewer = fewer.num_slots - 1, None
        for attempt in range(FEWER_ATTEMPTS):
            how = (moves // 3, EVEN, seed + attempt)
            fewer = fewer or _anneal_once(problem, start, num_slots, how)
        if fewer is not None:
            tried.append((fewer, EVEN))
            yield fewer
    for num_slots in (best.num_slots, best.num_slots + 1):
        if not _is_promising(problem, bound, num_slots, min([best, *(found for found, _ in tried)], key=_order)):
            continue
        styles = STYLES if num_slots == best.num_slots else (EVEN,)
        if problem.num_jobs <= HANDFUL:
            styles = STYLES + STRICT
        for style in styles:
            found = _anneal_once(problem, starts.get(num_slots, best), num_slots, (moves // 6, style, seed))
            assert found is not None, "the start keeps the limit"
            tried.append((found, style))
            yield found
    if tried:
        start, style = min(tried, key=lambda item: _order(item[0]))
        found = _anneal_once(problem, start, start.num_slots, (moves, style, seed + 1))
        assert found is not None, "the start keeps the limit"
        yield found
        if problem.barrier:
            yield _refined(problem, min(start, found, key=_order), (moves, seed))


def _refined(problem: Problem, start: Schedule, how: tuple[int, int]) -> Schedule:
    """Leveled; then annealed and leveled again a few times."""
    moves, seed = how
    best = _leveled(problem, start, (moves // 2, seed))
    for repeat in range(REPEATS):
        found = _anneal_once(problem, best, best.num_slots, (moves // 2, WARM, seed + 2 + repeat))
        assert found is not None, "the start keeps the limit"
        best = min(best, _leveled(problem, min(best, found, key=_order), (moves // 4, seed + repeat)), key=_order)
    return best


def _leveled(problem: Problem, start: Schedule, how: tuple[int, int]) -> Schedule:
    """The same makespan and slots that are more even, or a smaller makespan."""
    moves, seed = how
    num_bins = start.num_slots * problem.ranks
    bin_J = level(problem, start.bin_J, num_bins=num_bins, moves=moves, seed=seed)
    return schedule(problem, portfolio.close_gaps(bin_J))


def _work_beyond(candidate: Schedule, num_bins: int) -> int:
    """Work of all but the largest microbatches."""
    return int(np.sort(candidate.work_B)[: max(candidate.work_B.size - num_bins, 0)].sum())


def _is_promising(problem: Problem, bound: LowerBound, num_slots: int, best: Schedule) -> bool:
    """Whether so many slots may give a shorter step than the best, and the counters of the annealing fit."""
    if num_slots < bound.slots or problem.num_jobs * num_slots * problem.ranks > MAX_ANNEALED_CELLS:
        return False
    return bound.work + num_slots * problem.overhead < best.makespan


def _anneal_once(problem: Problem, start: Schedule, num_slots: int, how: tuple[int, Style, int]) -> Schedule | None:
    moves, style, seed = how
    num_bins = num_slots * problem.ranks
    # Annealing counts on microbatch b being on rank b % ranks.
    bin_J = (start.places.slot_B * problem.ranks + start.places.rank_B)[start.bin_J]
    if start.num_slots > num_slots:
        bin_J = _dissolved(bin_J, num_bins)
    found_J = anneal(problem, bin_J, num_bins=num_bins, moves=moves, seed=seed, style=style)
    return None if found_J is None else schedule(problem, portfolio.close_gaps(found_J))


def _dissolved(bin_J: NDArray[np.int64], num_bins: int) -> NDArray[np.int64]:
    """Jobs of bins from `num_bins` on, the smallest, join the nearest job in lexicographic order of another bin."""
    stays_K = np.flatnonzero(bin_J < num_bins)
    after_J = np.clip(np.searchsorted(stays_K, np.arange(bin_J.size)), 0, stays_K.size - 1)
    before_J = np.maximum(after_J - 1, 0)
    distance_J = np.abs(np.arange(bin_J.size) - stays_K[[before_J, after_J]])
    return bin_J[np.where(distance_J[0] < distance_J[1], stays_K[before_J], stays_K[after_J])]
