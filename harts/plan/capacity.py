"""The least capacity with which bins fill the slots of all ranks.

Less capacity takes more bins; how many tells which capacity to try next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harts.plan.beam import pack_alternatives
from harts.plan.pack import FIT_RULES, UNLIMITED, Trie, pack, trie_of
from harts.plan.problem import Problem

BEAM = 2
"""A rule beside those of `harts.plan.pack`: several alternatives for every subtree, `harts.plan.beam`."""
RULES = (*FIT_RULES, BEAM)
SMALL = 0.3
"""The beam takes subtrees of more than this part of a bin apart."""
PRICE = 0.125
"""What the beam counts for a bin beside its work, in work of a full one: fewer bins leave less to even out."""


def full_bin(problem: Problem) -> int:
    """Units. Work of as many tokens as the limit, at the mean of the step."""
    return problem.total_work * problem.limit // int(problem.size_S.sum())


def pack_tokens(problem: Problem, *, rule: int) -> NDArray[np.int64]:
    """[J] int64, the bin of each job where the token limit alone opens bins: few bins, little work."""
    return pack_capacity(problem, UNLIMITED, rule=rule)


def pack_capacity(problem: Problem, capacity: int, *, rule: int) -> NDArray[np.int64]:
    """[J] int64, the bin of each job where bins do at most `capacity` work, those of longer jobs as much as these."""
    trie = _trie_for(problem, capacity, rule)
    bin_I, _ = _pack(problem, trie, capacity, (rule, 0))
    return bin_I[trie.item_J]


def pack_slots(
    problem: Problem, *, num_slots: int, guess: int, rule: int, tolerance: float
) -> NDArray[np.int64] | None:
    """Pack into `num_slots` slots of all ranks, at nearly the least capacity that the rule allows.

    Args:
        problem: The jobs.
        num_slots: >= 1, enough for `pack_tokens` with the same rule.
        guess: Units. A capacity that should be a little too small, such as an even share of a lower bound.
        rule: One of `RULES`.
        tolerance: Capacities are tried until they differ by less than this part, or all but a quarter of this part of
            the slots are filled.

    Returns:
        [J] int64, bins, the best of the packings met; None if even a capacity several times the guess
        does not give so few.
    """
    most, makespan, best = num_slots * problem.ranks, UNLIMITED, None
    # With alternatives bins differ more in work: the least capacity is 10% to 20% above an even share.
    capacity = max(guess + guess // 8 if rule == BEAM else guess, 1)
    trie, contracted = _trie_for(problem, capacity, rule), capacity
    low, high, fewer, more = 0, 0, 0, 0  # capacities known to be too small and large enough, and the bins they need
    spare = int(most * tolerance / 4)
    while high == 0 or (high - low > max(1, int(high * tolerance)) and most - fewer >= spare):
        if capacity < contracted:
            trie, contracted = _trie_for(problem, capacity, rule), capacity
        bin_I, work_B = _pack(problem, trie, capacity, (rule, int(capacity * tolerance / 2)))
        if work_B.size > most:
            low, more = capacity, work_B.size
            if high == 0 and capacity > 4 * guess:
                return None
        else:
            high, fewer = capacity, work_B.size
            height = int(np.sort(work_B)[::-1][:: problem.ranks].sum())
            height += -(-work_B.size // problem.ranks) * problem.overhead
            if height < makespan:
                makespan, best = height, bin_I[trie.item_J]
        if high > 0:
            capacity = _between((low, more), (high, fewer), most)
        else:  # full bins keep their work together; those that do not fill need the more steps, each twice as long
            capacity = max(low * more // most + low // 128, 2 * low - guess + low // 64) + 1
    return best


def _trie_for(problem: Problem, capacity: int, rule: int) -> Trie:
    return trie_of(problem, capacity, fraction=SMALL if rule == BEAM else 1.0)


def _pack(
    problem: Problem, trie: Trie, capacity: int, how: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What `pack` returns, by any rule; `how` is the rule and the room with which a bin counts as full."""
    rule, closed = how
    if rule == BEAM:
        price = int(PRICE * min(capacity, full_bin(problem)))
        return pack_alternatives(trie, capacity, problem.limit, price)
    return pack(trie, capacity, problem.limit, rule, closed)


def _between(low: tuple[int, int], high: tuple[int, int], most: int) -> int:
    """A capacity that should need `most` bins.

    Args:
        low: A capacity that needs more than `most` bins, and how many; zeros if none is known.
        high: One that does not, and how many it needs.
        most: >= 1.
    """
    if low[0] == 0:
        return max(min(high[0] * high[1] // most, high[0] - high[0] // 8 - 1), 1)
    apart = high[0] - low[0]
    further = apart * (2 * (low[1] - most) - 1) // (2 * (low[1] - high[1]))  # between `most` bins and one more
    return low[0] + min(max(further, apart // 8, 1), apart - apart // 8 - 1)
