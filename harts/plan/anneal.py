"""Annealing of the jobs' places: for steps so small that packing leaves room to gain.

Moves a job or the part of a subtree that a microbatch holds, or swaps two jobs or two such parts; the place moved to
is mostly that of a neighbour in lexicographic order, where prefixes are shared. A fixed number of moves and only exact
or correctly rounded arithmetic (no exponential, no logarithm), so the result is the same on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem, jobs_below

STAGES, COOLING = 128, 0.96
"""Steps of the temperature and its factor; the last is 1/190 of the first."""
MAX_SUBTREE = 256
"""Jobs below the largest branch point whose part in a microbatch is moved at once."""
HIGHEST_ANNEALED, HIGHEST_LEVELED = 4, 8
"""Of 16 moves of annealing and of leveling, so many begin at the highest microbatch of a slot."""
UNBOUNDED = 1 << 60
"""More work than any."""
OVER_GROWTH = 1.045
"""Factor of the weight of tokens beyond the limit, from stage to stage; the last is 270 times the first."""

inlined = numba.njit(cache=True, forceinline=True, _nrt=False)  # type: ignore[call-overload]
"""For what runs for every move: without reference counts of arrays, which take two thirds of the time."""


class State(NamedTuple):
    """Where jobs are, and what follows from it."""

    bin_J: NDArray[np.int64]
    """Microbatch of each job."""
    used_BS: NDArray[np.int16]
    """Children (jobs, for a leaf) of each segment that have jobs in each microbatch. A move touches two microbatches,
    and segments of one subtree stand together."""
    work_B: NDArray[np.int64]
    """Work of each microbatch."""
    tokens_B: NDArray[np.int64]
    """Distinct tokens of each."""
    sorted_B: NDArray[np.int64]
    """Microbatches by descending work."""
    place_B: NDArray[np.int64]
    """Place of each in `sorted_B`."""
    moved: NDArray[np.int64]
    """Jobs of the move at hand; scratch."""


class Style(NamedTuple):
    """How to anneal. What is best differs from step to step, so several are tried."""

    heat: float
    """Temperature at the beginning, as a part of the makespan that each job has on average."""
    spread: float
    """Weight of a penalty on uneven bins; 0 looks at the makespan alone, which rests on few bins."""
    thrift: float = 1.0
    """Weight of the mean work of a rank beside the makespan: prefer less work, the more the earlier. Few jobs are soon
    stuck where work is least, and take little of it."""
    over: float = 0.3
    """Weight of tokens beyond the limit at the beginning, in units of the mean work of a token. Passing through plans
    that break the limit reaches fewer microbatches than keeping it; a large weight keeps it."""


class Shape(NamedTuple):
    """What does not change."""

    parent_S: NDArray[np.int64]
    own_S: NDArray[np.int64]
    size_S: NDArray[np.int64]
    tail_J: NDArray[np.int64]
    first_S: NDArray[np.int64]
    """First job below each segment; its jobs are contiguous."""
    count_S: NDArray[np.int64]
    """Jobs below each segment."""
    ranks: int
    limit: int
    barrier: bool
    height: float
    """Work of a microbatch in a perfectly even plan."""
    token_work: float
    """Mean work of a token."""


@inlined
def _random(state):
    """The next 64 bits of SplitMix64 (Steele, Lea and Flood 2014)."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inlined
def _below(state, bound):
    """A random integer from 0 to `bound` - 1."""
    return np.int64((_random(state) >> np.uint64(33)) % np.uint64(bound))


@inlined
def _exponential(state):
    """A random number of about the exponential distribution, mean near 1, by halving: no logarithm is taken."""
    bits = np.int64(_random(state) >> np.uint64(12))
    whole = 0
    while whole < 40 and bits & 1:
        bits >>= 1
        whole += 1
    # Uniform between two halvings: the distribution is exact at every halving and linear between.
    return 0.6931471805599453 * (whole + np.int64(_random(state) >> np.uint64(33)) / 2147483648.0)


@inlined
def _exchange(shape, state, count, source, target):
    """Move each of the jobs at hand from one of the two microbatches to the other; twice changes nothing."""
    parent_S, own_S, size_S, tail_J = shape.parent_S, shape.own_S, shape.size_S, shape.tail_J
    bin_J, used_BS, work_B, tokens_B = state.bin_J, state.used_BS, state.work_B, state.tokens_B
    moved = state.moved
    for i in range(count):
        job = moved[i]
        old = bin_J[job]
        new = target if old == source else source
        bin_J[job] = new
        segment = tail_J[job]
        while segment >= 0:
            used_BS[old, segment] -= 1
            if used_BS[old, segment] > 0:
                break
            work_B[old] -= own_S[segment]
            tokens_B[old] -= size_S[segment]
            segment = parent_S[segment]
        segment = tail_J[job]
        while segment >= 0:
            used_BS[new, segment] += 1
            if used_BS[new, segment] > 1:
                break
            work_B[new] += own_S[segment]
            tokens_B[new] += size_S[segment]
            segment = parent_S[segment]


@inlined
def _resort(order, place_B, work_B, number):
    """Put one microbatch in its place by descending work, the others being sorted."""
    place, work = place_B[number], work_B[number]
    while place > 0 and work_B[order[place - 1]] < work:
        order[place] = order[place - 1]
        place_B[order[place]] = place
        place -= 1
    while place + 1 < order.size and work_B[order[place + 1]] > work:
        order[place] = order[place + 1]
        place_B[order[place]] = place
        place += 1
    order[place] = number
    place_B[number] = place


@inlined
def _makespan(shape, state):
    """Without overheads. Without barriers, microbatch `b` runs on rank `b % ranks`."""
    order, work_B, ranks, total = state.sorted_B, state.work_B, shape.ranks, 0
    if shape.barrier:
        for place in range(0, order.size, ranks):
            total += work_B[order[place]]
        return total
    for rank in range(ranks):
        load = 0
        for number in range(rank, work_B.size, ranks):
            load += work_B[number]
        total = max(total, load)
    return total


@inlined
def _work_without(order, work_B, place, first, second):
    """Work at a place of the order if the microbatches at two places were not there."""
    if place >= first:
        place += 1
    if place >= second:
        place += 1
    if place < 0:
        return UNBOUNDED
    return work_B[order[place]] if place < order.size else 0


@inlined
def _makespan_of_moved(shape, state, one, other):
    """The makespan if the work of two microbatches has changed since they were sorted."""
    if not shape.barrier:
        return _makespan(shape, state)
    order, work_B, total = state.sorted_B, state.work_B, 0
    first, second = state.place_B[one], state.place_B[other]
    first, second = min(first, second), max(first, second)
    larger, smaller = max(work_B[one], work_B[other]), min(work_B[one], work_B[other])
    for place in range(0, order.size, shape.ranks):
        work = work_B[order[place]]
        is_behind, is_before = first > place and larger <= work, second < place and smaller >= work
        if not (is_behind or is_before):  # of the two, none may stand before this place, or one, or both
            work = _work_without(order, work_B, place, first, second)
            work = max(work, min(larger, _work_without(order, work_B, place - 1, first, second)))
            work = max(work, min(smaller, _work_without(order, work_B, place - 2, first, second)))
        total += work
    return total


@numba.njit(cache=True)
def _place_all(shape, state):
    """Count the jobs where they are, and sort the microbatches."""
    for job in range(state.bin_J.size):
        number, segment = state.bin_J[job], shape.tail_J[job]
        while segment >= 0:
            state.used_BS[number, segment] += 1
            if state.used_BS[number, segment] > 1:
                break
            state.work_B[number] += shape.own_S[segment]
            state.tokens_B[number] += shape.size_S[segment]
            segment = shape.parent_S[segment]
    order = np.argsort(-state.work_B, kind="mergesort")
    for place in range(order.size):
        state.sorted_B[place] = order[place]
        state.place_B[order[place]] = place


@inlined
def _sort_two(state, one, other):
    order, place_B, work_B = state.sorted_B, state.place_B, state.work_B
    _resort(order, place_B, work_B, one)
    _resort(order, place_B, work_B, other)
    _resort(order, place_B, work_B, one)  # the other may have stood in its way


@inlined
def _sixth_power(shape, work):
    relative = work / shape.height
    cube = relative * relative * relative
    return cube * cube


@inlined
def _job_of(bin_J, job, number):
    """The first job of a microbatch from the one given on, or the one given if it is empty."""
    for begin, end in ((job, bin_J.size), (0, job)):
        for other in range(begin, end):
            if bin_J[other] == number:
                return other
    return job


@inlined
def _propose(shape, state, random, highest):
    """Choose jobs and where they go: their number, their microbatch and the other. The jobs are in `state.moved`; with
    a swap the last of them come from the other microbatch. No jobs if there is nothing to move. Of 16 moves, `highest`
    begin at the highest microbatch of a slot."""
    bin_J, kind = state.bin_J, _below(random, 16)
    jobs = bin_J.size
    job = _below(random, jobs)
    if highest > 0 and _below(random, 16) < highest:
        job = _job_of(bin_J, job, state.sorted_B[shape.ranks * _below(random, state.sorted_B.size // shape.ranks)])
    partner = _below(random, jobs)
    if _below(random, 8) > 0:
        distance = 1 + _below(random, 8)
        partner = job + distance if _below(random, 2) > 0 else job - distance
        step = 1 if partner > job else -1
        while 0 <= partner < jobs and bin_J[partner] == bin_J[job]:
            partner += step
        if partner < 0 or partner >= jobs:
            return 0, 0, 0
    source, target = bin_J[job], bin_J[partner]
    if kind < 9 and _below(random, 8) == 0:
        target = _below(random, state.work_B.size)
    if source == target:
        return 0, 0, 0
    state.moved[0] = job
    if kind < 3:
        return 1, source, target
    if kind >= 14:
        state.moved[1] = partner
        return 2, source, target
    count = _take_part(shape, state, random, job, 0)
    if kind >= 9:
        count = _take_part(shape, state, random, partner, count)
    return count, source, target


@inlined
def _take_part(shape, state, random, job, count):
    """Add the jobs that a job's microbatch holds of a subtree around it to `state.moved`; returns their new number."""
    bin_J, moved, parent_S = state.bin_J, state.moved, shape.parent_S
    number, segment = bin_J[job], shape.tail_J[job]
    for _ in range(_below(random, 9)):
        parent = parent_S[segment]
        if parent < 0 or shape.count_S[parent] > MAX_SUBTREE:
            break
        segment = parent
    for other in range(shape.first_S[segment], shape.first_S[segment] + shape.count_S[segment]):
        if bin_J[other] == number:
            moved[count] = other
            count += 1
    return count


@inlined
def _over(shape, state, number):
    """Tokens of a microbatch beyond the limit."""
    return max(state.tokens_B[number] - shape.limit, 0)


@inlined
def _try_move(shape, state, random, energy, limits):
    """Propose one move and keep it if it raises the energy by less than a random part of the temperature."""
    makespan, penalty, over = energy
    temperature, work_weight, penalty_weight, over_weight = limits
    count, source, target = _propose(shape, state, random, HIGHEST_ANNEALED)
    if count == 0:
        return energy
    work_before = state.work_B[source] + state.work_B[target]
    penalty_after = penalty - _sixth_power(shape, state.work_B[source]) - _sixth_power(shape, state.work_B[target])
    over_after = over - _over(shape, state, source) - _over(shape, state, target)
    _exchange(shape, state, count, source, target)
    over_after += _over(shape, state, source) + _over(shape, state, target)
    makespan_after = _makespan_of_moved(shape, state, source, target)
    work_after = state.work_B[source] + state.work_B[target]
    penalty_after += _sixth_power(shape, state.work_B[source]) + _sixth_power(shape, state.work_B[target])
    rise = makespan_after - makespan + work_weight * (work_after - work_before)
    rise += penalty_weight * (penalty_after - penalty) + over_weight * (over_after - over)
    if rise <= 0 or rise <= temperature * _exponential(random):
        _sort_two(state, source, target)
        return makespan_after, penalty_after, over_after
    _exchange(shape, state, count, source, target)
    return energy


@numba.njit(cache=True)
def _anneal(shape, state, random, moves, style):
    """Run all stages from the state given; returns the best assignment seen and whether it keeps the limit."""
    over = 0
    for number in range(state.work_B.size):
        over += _over(shape, state, number)
    best = _makespan(shape, state)
    best_J = state.bin_J.copy()
    is_found = over == 0
    over_weight = style.over * shape.token_work
    temperature = style.heat * best / state.bin_J.size
    penalty_weight = style.spread * 0.3 * shape.height / state.work_B.size
    for stage in range(STAGES):
        # What guides the search at first must not keep it from the shortest at last.
        fade = 1.0 - stage / STAGES
        limits = (temperature, fade * style.thrift / shape.ranks, fade * penalty_weight, over_weight)
        penalty = 0.0
        for work in state.work_B:
            penalty += _sixth_power(shape, work)
        energy = (_makespan(shape, state), penalty, over)
        for _ in range(moves // STAGES):
            energy = _try_move(shape, state, random, energy, limits)
            if energy[2] == 0 and (energy[0] < best or not is_found):
                best, is_found = energy[0], True
                best_J[:] = state.bin_J
        over = energy[2]
        temperature *= COOLING
        over_weight *= OVER_GROWTH
    return best_J, is_found


def anneal(
    problem: Problem, bin_J: NDArray[np.int64], *, num_bins: int, moves: int, seed: int, style: Style
) -> NDArray[np.int64] | None:
    """Improve a packing.

    Args:
        problem: The jobs; jobs x bins decide the memory.
        bin_J: [J] int64. The packing to start from; bins may hold more tokens than the limit.
        num_bins: Bins that may be used, a multiple of the ranks.
        moves: Moves tried.
        seed: Of the random numbers.
        style: How.

    Returns:
        [J] int64, the assignment of least makespan seen within the limit, or None if none was; bins may be empty.
    """
    shape, state = _prepared(problem, bin_J, num_bins)
    best_J, is_found = _anneal(shape, state, np.array([seed], dtype=np.uint64), moves, style)
    return best_J if is_found else None


def level(problem: Problem, bin_J: NDArray[np.int64], *, num_bins: int, moves: int, seed: int) -> NDArray[np.int64]:
    """Even out the slots of a packing; the makespan does not grow, and the work of all bins only where that falls.

    Args:
        problem: With barriers.
        bin_J: [J] int64. The packing to start from, each bin within the token limit.
        num_bins: Bins that may be used, a multiple of the ranks.
        moves: Moves tried.
        seed: Of the random numbers.

    Returns:
        [J] int64, the assignment; bins may be empty.
    """
    shape, state = _prepared(problem, bin_J, num_bins)
    _level(shape, state, np.array([seed], dtype=np.uint64), moves)
    return state.bin_J


@inlined
def _unevenness(shape, state):
    """Sum over slots of the fourth power of the largest over the mean, less 1: the worst slots count."""
    total = 0.0
    for begin in range(0, state.sorted_B.size, shape.ranks):
        work = 0
        for place in range(begin, begin + shape.ranks):
            work += state.work_B[state.sorted_B[place]]
        excess = state.work_B[state.sorted_B[begin]] * shape.ranks / max(work, 1) - 1.0
        total += excess * excess * excess * excess
    return total


@inlined
def _try_to_level(shape, state, random, reached):
    """Propose one move and keep it if the step gets shorter, or its slots more even and it neither longer nor more
    work."""
    makespan, unevenness = reached
    count, source, target = _propose(shape, state, random, HIGHEST_LEVELED)
    if count == 0:
        return reached
    work = state.work_B[source] + state.work_B[target]
    _exchange(shape, state, count, source, target)
    if _over(shape, state, source) + _over(shape, state, target) == 0:
        makespan_after = _makespan_of_moved(shape, state, source, target)
        is_cheap = makespan_after == makespan and state.work_B[source] + state.work_B[target] <= work
        if makespan_after < makespan or is_cheap:
            _sort_two(state, source, target)
            unevenness_after = _unevenness(shape, state)
            if makespan_after < makespan or unevenness_after < unevenness:
                return makespan_after, unevenness_after
            _exchange(shape, state, count, source, target)
            _sort_two(state, source, target)
            return reached
    _exchange(shape, state, count, source, target)
    return reached


@numba.njit(cache=True)
def _level(shape, state, random, moves):
    """Try so many moves."""
    reached = _makespan(shape, state), _unevenness(shape, state)
    for _ in range(moves):
        reached = _try_to_level(shape, state, random, reached)


def _prepared(problem: Problem, bin_J: NDArray[np.int64], num_bins: int) -> tuple[Shape, State]:
    """What moves need, the jobs in their places."""
    jobs, segments = problem.num_jobs, problem.parent_S.size
    first_S, count_S = jobs_below(problem.parent_S, problem.tail_J)
    shape = Shape(
        problem.parent_S,
        problem.own_S,
        problem.size_S,
        problem.tail_J,
        first_S,
        count_S,
        problem.ranks,
        problem.limit,
        problem.barrier,
        max(problem.total_work / num_bins, 1.0),
        problem.total_work / int(problem.size_S.sum()),
    )
    zeros_B = np.zeros(num_bins, dtype=np.int64)
    state = State(
        bin_J.copy(),
        np.zeros((num_bins, segments), dtype=np.int16),
        zeros_B,
        zeros_B.copy(),
        zeros_B.copy(),
        zeros_B.copy(),
        np.zeros(max(jobs, 2), dtype=np.int64),
    )
    _place_all(shape, state)
    return shape, state
