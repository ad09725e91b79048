"""A lower bound from prices: what a microbatch of some work can be worth, against what all jobs are worth.

Give every job a price, whatever it is. A microbatch that does at most `h` work within the token limit holds jobs worth
at most `D(h)`; a dynamic program over the trie finds it. Slots of heights `h_1 >= h_2 >= ...` hold at most
`ranks * (D(h_1) + D(h_2) + ...)`, and every plan's slots hold all jobs. So the least sum of heights whose slots can is
a bound. Good prices are dual variables of packing jobs into all possible microbatches (Gilmore and Gomory, "A linear
programming approach to the cutting stock problem", 1961), found by subgradients (Held and Karp, "The traveling-salesman
problem and minimum spanning trees: part II", 1971). One set of prices need not rule out all plans that are shorter, so
each interval of `h_1` has those that are best for it.

Values are integers and work is rounded down, so the bound is exact; which prices are tried depends on floats, of which
only basic operations are used: all machines find the same bound. `V` is a dimension over values, `C` over intervals.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem, jobs_below

VALUE, LEAST_MEAN = 500, 8
"""What all jobs together are worth for each rank, and the mean of a job from which prices are fine enough."""
CELLS = 96
"""Intervals of the first slot's height."""
ROUNDS, EFFORT, PROBE = 450, 450_000, 100
"""Prices tried; segments times prices tried; and in how many the bound must be better than one that is known."""
PATIENCE = 20
"""Prices tried for one interval before the lowest is looked for again."""
NEAR = 16
"""Sets of jobs taken per slot: the most valuable, and some worth a little less. Their mean shows what is scarce."""
RATE, SLOWER = 0.01, 0.7
"""How fast prices follow demand, and its factor whenever an interval stays the lowest."""
MEMORY, MOST_CHANGE = 0.9, 0.3
"""How slowly demand forgets, and the largest change of a price."""
WORK_BITS = 29
"""Of the work of all jobs in 32 bits, so that the sum of two fits."""
UNREACHED = np.int32(1 << WORK_BITS)


class Step(NamedTuple):
    """What does not change. Segments stand in preorder: what is below one follows it."""

    own_S: NDArray[np.int32]
    """Work, in units of the search."""
    size_S: NDArray[np.int32]
    """Tokens."""
    next_S: NDArray[np.int64]
    """The first segment that is not below; S if there is none."""
    job_S: NDArray[np.int64]
    """Job of each leaf, -1 above."""
    ranks: int
    limit: int
    overhead: int
    """Of a slot, in units of the search."""
    edge_C: NDArray[np.int64]
    """Where intervals of the first slot's height begin, ascending; the first at the longest job alone."""


class Found(NamedTuple):
    """What prices tell."""

    work_SV: NDArray[np.int32]
    """[S + 1, V]. Least work of jobs worth at least a value, below what is above each segment and not before it."""
    tokens_SV: NDArray[np.int32]
    """The same of tokens."""
    bound_C: NDArray[np.int64]
    """Of the makespan, if the first slot's height is in the interval."""
    rest_V: NDArray[np.int32]
    """Scratch: least cost of slots worth a value."""
    traced_V: NDArray[np.int32]
    """The same, as it was where the interval looked at had its bound."""
    slots: NDArray[np.int64]
    """Values of the slots that reach the bound of the interval looked at, then zeros."""


def priced_bound(problem: Problem, *, known: int, reached: int) -> int:
    """Bound the makespan of every plan from below.

    Args:
        problem: With barriers.
        known: Units. A bound; the search ends early if it finds none that is better.
        reached: Units. Makespan of a plan, larger than `known`.

    Returns:
        Units; at least `known`. Just that if there is no work, or too many jobs a rank for integer prices: then plans
        are near the other bound anyway.
    """
    assert problem.barrier
    assert known < reached
    if problem.total_work == 0 or problem.num_jobs * LEAST_MEAN > VALUE * problem.ranks:
        return known
    # Rounding down segment by segment leaves no set of jobs more work than it has.
    shift = max((problem.total_work + problem.overhead).bit_length() - WORK_BITS, 0)
    longest, top = int(problem.path_D[-1]) >> shift, reached >> shift
    job_S = np.full(problem.parent_S.size, -1)
    job_S[problem.tail_J] = np.arange(problem.num_jobs)
    step = Step(
        (problem.own_S >> shift).astype(np.int32),
        problem.size_S.astype(np.int32),
        _next_segments(problem.parent_S),
        job_S,
        problem.ranks,
        problem.limit,
        problem.overhead >> shift,
        longest + (top - longest) * np.arange(CELLS) // (CELLS - 1),
    )
    _, count_S = jobs_below(problem.parent_S, problem.tail_J)
    below = (problem.parent_S, problem.tail_J, count_S)
    shares = [_shares(weight_S, *below) for weight_S in (problem.own_S, problem.size_S)]
    rounds = min(ROUNDS, EFFORT // problem.parent_S.size)
    bound = _search(step, np.stack(shares), known >> shift, rounds)
    return max(known, int(bound) << shift)


@numba.njit(cache=True)
def _next_segments(parent_S):
    """The first segment behind the subtree of each."""
    next_S = np.arange(1, parent_S.size + 1)
    for segment in range(parent_S.size - 1, -1, -1):
        parent = parent_S[segment]
        if parent >= 0:
            next_S[parent] = max(next_S[parent], next_S[segment])
    return next_S


@numba.njit(cache=True)
def _shares(weight_S, parent_S, tail_J, count_S):
    """Each segment's weight, shared equally by the jobs below it; over the weight of all."""
    share_S = np.zeros(parent_S.size)
    for segment in range(parent_S.size):
        share_S[segment] = weight_S[segment] / count_S[segment]
        if parent_S[segment] >= 0:
            share_S[segment] += share_S[parent_S[segment]]
    return share_S[tail_J] / weight_S.sum()


@numba.njit(cache=True)
def _search(step, start_KJ, known, rounds):
    """Try prices; returns the best bound."""
    jobs, cells = start_KJ.shape[1], step.edge_C.size
    widest = VALUE + jobs // step.ranks + 2
    found = Found(
        np.empty((step.own_S.size + 1, widest), dtype=np.int32),
        np.empty((step.own_S.size + 1, widest), dtype=np.int32),
        np.empty(cells, dtype=np.int64),
        np.empty(widest, dtype=np.int32),
        np.empty(widest, dtype=np.int32),
        np.empty(widest, dtype=np.int64),
    )
    best_C, best_round_C = np.zeros(cells, dtype=np.int64), np.zeros(cells, dtype=np.int64)
    weight_NJ = np.empty((rounds, jobs))
    weight_J, price_S = start_KJ[0].copy(), np.zeros(step.own_S.size, dtype=np.int64)
    demand_J, taken_J = np.ones(jobs), np.zeros(jobs)
    cell, rate = -1, RATE
    for number in range(rounds):
        if number < start_KJ.shape[0]:
            weight_J[:] = start_KJ[number]
        elif (number - start_KJ.shape[0]) % PATIENCE == 0:
            if (number > PROBE and best_C.min() < known) or best_C.min() >= step.edge_C[-1]:
                break
            lowest = np.argmin(best_C)
            rate *= SLOWER
            if lowest != cell:
                cell, rate = lowest, RATE
                weight_J[:] = weight_NJ[best_round_C[cell]]
                demand_J[:] = 1.0
        weight_NJ[number] = weight_J
        need = _set_prices(step, weight_J, price_S)
        most = _evaluate(step, found, price_S, need, cell)
        for other in range(cells):
            if found.bound_C[other] > best_C[other]:
                best_C[other], best_round_C[other] = found.bound_C[other], number
        if cell >= 0:
            _take(step, found, price_S, (need, most), taken_J)
            for job in range(jobs):
                demand_J[job] = MEMORY * demand_J[job] + (1.0 - MEMORY) * step.ranks * taken_J[job]
                change = rate * (demand_J[job] - 1.0)
                weight_J[job] *= 1.0 - max(min(change, MOST_CHANGE), -MOST_CHANGE)
    return best_C.min()


@numba.njit(cache=True)
def _set_prices(step, weight_J, price_S):
    """Integer prices in proportion to weights; returns what the slots of one rank must be worth at least."""
    scale, total = VALUE * step.ranks / weight_J.sum(), 0
    for segment in range(price_S.size):
        if step.job_S[segment] >= 0:
            price_S[segment] = int(weight_J[step.job_S[segment]] * scale + 0.5)
            total += price_S[segment]
    return (total + step.ranks - 1) // step.ranks


@numba.njit(cache=True)
def _evaluate(step, found, price_S, need, cell):
    """Bound every interval; returns the largest value within the token limit, at most `need`."""
    _fill_least(found.work_SV, step.own_S, price_S, step.next_S, need)
    _fill_least(found.tokens_SV, step.size_S, price_S, step.next_S, need)
    most = need
    while found.tokens_SV[0, most] > step.limit:
        most -= 1
    _bound_cells(step, found, need, most, cell)
    return most


@numba.njit(cache=True)
def _fill_least(least_SV, weight_S, price_S, next_S, need):
    """Least weight of jobs worth at least each value up to `need`, from every segment on: with the segment, or without
    it and all below."""
    last = weight_S.size
    least_SV[last, 1 : need + 1] = UNREACHED
    least_SV[:, 0] = 0
    for segment in range(last - 1, -1, -1):
        price, weight = min(price_S[segment], need), weight_S[segment]
        least_V, without_V = least_SV[segment, 1 : need + 1], least_SV[next_S[segment], 1 : need + 1]
        _take_less(least_V[:price], without_V[:price], weight)
        _take_less_of_sum(least_V[price:], without_V[price:], least_SV[segment + 1, 1 : need + 1 - price], weight)


@numba.njit(cache=True)
def _take_less(out, one, weight):
    for i in range(out.size):
        out[i] = min(one[i], weight)


@numba.njit(cache=True)
def _take_less_of_sum(out, one, other, weight):
    for i in range(out.size):
        out[i] = min(one[i], np.int32(other[i] + weight))


@numba.njit(cache=True)
def _bound_cells(step, found, need, most, cell):
    """Bound the makespan for every interval of the first slot's height.

    A slot of `value` does the least work for it and up to less than the next value needs. Slots behind the first are no
    higher, so they are worth no more: values are added one by one, and the cheapest slots so far are those of the rest.
    """
    least_V, rest_V, edge_C, bound_C = found.work_SV[0], found.rest_V, step.edge_C, found.bound_C
    bound_C[:] = UNREACHED
    rest_V[0], rest_V[1 : need + 1] = 0, UNREACHED
    begin, before, first = 0, 0, 0
    for value in range(1, most + 1):
        if value < most and least_V[value + 1] == least_V[value]:
            continue
        cost = np.int32(least_V[value] + step.overhead)
        _add_value(rest_V, (before, value, need), cost)
        before = value
        while begin + 1 < edge_C.size and edge_C[begin + 1] <= least_V[value]:
            begin += 1
        number = begin
        while number < edge_C.size and (value == most or edge_C[number] < least_V[value + 1]):
            height = max(np.int64(least_V[value]), edge_C[number])
            if height + step.overhead + rest_V[need - value] < bound_C[number]:
                bound_C[number] = height + step.overhead + rest_V[need - value]
                if number == cell:
                    first = value
                    found.traced_V[: need + 1] = rest_V[: need + 1]
            number += 1
    found.slots[0] = first
    if first > 0:
        _trace(step, found, need - first, first)


@numba.njit(cache=True)
def _add_value(rest_V, values, cost):
    """Let slots be worth `value` at a cost. Up to the value before nothing changes: that one costs less."""
    before, value, need = values
    _take_less(rest_V[before + 1 : value + 1], rest_V[before + 1 : value + 1], cost)
    for begin in range(value + 1, need + 1, value):  # a block needs the one before
        end = min(begin + value, need + 1)
        _take_less_of_sum(rest_V[begin:end], rest_V[begin:end], rest_V[begin - value : end - value], cost)


@numba.njit(cache=True)
def _trace(step, found, left, largest):
    """Which slots make up the cheapest rest."""
    count, traced_V = 1, found.traced_V
    while left > 0 and traced_V[left] < UNREACHED:
        for value in range(1, largest + 1):
            behind = max(left - value, 0)
            if traced_V[left] == traced_V[behind] + found.work_SV[0, value] + step.overhead:
                found.slots[count] = value
                left, count = behind, count + 1
                break
    found.slots[count] = 0


@numba.njit(cache=True)
def _take(step, found, price_S, values, taken_J):
    """How often the slots' most valuable microbatches hold each job."""
    need, most = values
    taken_J[:] = 0.0
    for slot in range(found.slots.size):
        value = found.slots[slot]
        if value == 0:
            break
        for less in range(NEAR):
            if value == most and most < need:
                _add_jobs(found.tokens_SV, step, price_S, max(value - less, 1), taken_J)
            else:
                _add_jobs(found.work_SV, step, price_S, max(value - less, 1), taken_J)


@numba.njit(cache=True)
def _add_jobs(least_SV, step, price_S, value, taken_J):
    """Add the jobs of least weight for a value."""
    segment = 0
    while value > 0:
        if least_SV[step.next_S[segment], value] <= least_SV[segment, value]:
            segment = step.next_S[segment]
            continue
        if step.job_S[segment] >= 0:
            taken_J[step.job_S[segment]] += 1.0 / NEAR
        value = max(value - price_S[segment], 0)
        segment += 1
