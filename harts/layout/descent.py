"""A shorter critical path in as many rounds: the longest runs of a round are pushed into later ones. Compiled.

Every round has a limit on the chunks of its runs, at first those of its longest run in a given schedule. Limits that
some schedule keeps are also kept by the earliest such schedule, which a walk from the roots finds. So a limit is
lowered as far as a schedule still exists, one round after the other: runs that are too long move to the next round
that takes them, and what follows them moves on. Limits only fall, so what failed once fails for good, and one pass
leaves no single limit that could be lowered.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

STEPS_PER_RUN = 256
"""Work after which a descent stops where it is, in runs and rounds looked at for each run. Schedules that need more
are chains of thousands of rounds, which the latest rounds serve well already."""


def descend(
    parent: NDArray[np.int64], chunks: NDArray[np.int64], *, start: NDArray[np.int64], latest: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Lower the longest runs of a schedule's rounds.

    Args:
        parent: [runs] int64. Run that each run follows, smaller than its own number; -1 for none.
        chunks: [runs] int64, >= 1. Chunks of each run.
        start: [runs] int64. A schedule.
        latest: [runs] int64. The latest round of each run.

    Returns:
        [runs] int64. A schedule with a critical path no longer than that of `start`. Takes at most `STEPS_PER_RUN`
        steps a run.
    """
    num_rounds = int(latest.max()) + 1
    limit = np.zeros(num_rounds, dtype=np.int64)
    np.maximum.at(limit, start, chunks)
    round_of_run = np.empty(parent.size, dtype=np.int64)
    steps = _fill(parent, chunks, limit, round_of_run, STEPS_PER_RUN * parent.size)
    if steps < 0:
        return start
    limit[:] = 0
    np.maximum.at(limit, round_of_run, chunks)
    _lower_limits((parent, chunks, latest, *_children(parent)), limit, round_of_run, steps)
    return round_of_run


@numba.njit(cache=True)
def _fill(parent, chunks, limit, round_of_run, budget):
    """Put every run in the first round after its parent's that takes it; the steps left, negative if they ran out."""
    for run in range(parent.size):
        target = round_of_run[parent[run]] + 1 if parent[run] >= 0 else 0
        while limit[target] < chunks[run]:
            target += 1
            budget -= 1
        round_of_run[run] = target
        if budget < 0:
            break
    return budget


@numba.njit(cache=True)
def _children(parent):
    """First child of each run and next child of the same parent, -1 for none."""
    first, following = np.full(parent.size, -1), np.full(parent.size, -1)
    for run in range(parent.size - 1, -1, -1):
        if parent[run] >= 0:
            following[run] = first[parent[run]]
            first[parent[run]] = run
    return first, following


@numba.njit(cache=True)
def _lower_limits(forest, limit, round_of_run, budget):
    """Lower each round's limit as far as it goes, from the last round to the first."""
    chunks = forest[1]
    # The runs of each round as a doubly linked list.
    head, after, before = np.full(limit.size, -1), np.full(chunks.size, -1), np.full(chunks.size, -1)
    members = (head, after, before)
    for run in range(chunks.size - 1, -1, -1):
        _link(run, round_of_run[run], members)
    stack, moved, origin = np.empty_like(chunks), np.empty_like(chunks), np.empty_like(chunks)
    for source in range(limit.size - 1, -1, -1):
        while True:
            longest, run = 0, head[source]
            while run >= 0:
                longest = max(longest, chunks[run])
                run = after[run]
                budget -= 1
            limit[source] = longest
            if longest == 1:
                break
            limit[source] = longest - 1
            budget, count, done = _evict(source, forest, limit, (round_of_run, members, stack, moved, origin), budget)
            if not done:
                limit[source] = longest
                for i in range(count - 1, -1, -1):
                    _move(moved[i], origin[i], round_of_run, members)
                break
        if budget < 0:
            break


@numba.njit(cache=True)
def _evict(source, forest, limit, state, budget):
    """Move runs above the limit of `source` to later rounds, and those that follow them.

    Returns the steps left, how many runs moved, and whether all found a round; if not, the caller moves them back.
    """
    parent, chunks, latest, first_child, next_child = forest
    round_of_run, members, stack, moved, origin = state
    head, after, _ = members
    waiting, count = 0, 0
    run = head[source]
    while run >= 0:
        if chunks[run] > limit[source]:
            stack[waiting] = run
            waiting += 1
        run = after[run]
        budget -= 1
    while waiting > 0:
        waiting -= 1
        run = stack[waiting]
        target = round_of_run[run]
        if parent[run] >= 0:
            target = max(target, round_of_run[parent[run]] + 1)
        while target <= latest[run] and limit[target] < chunks[run]:
            target += 1
            budget -= 1
        if target > latest[run] or budget < 0:
            return budget, count, False
        moved[count], origin[count] = run, round_of_run[run]
        count += 1
        _move(run, target, round_of_run, members)
        child = first_child[run]
        while child >= 0:
            if round_of_run[child] <= target:
                stack[waiting] = child
                waiting += 1
            child = next_child[child]
            budget -= 1
    return budget, count, True


@numba.njit(cache=True)
def _move(run, target, round_of_run, members):
    head, after, before = members
    if before[run] >= 0:
        after[before[run]] = after[run]
    else:
        head[round_of_run[run]] = after[run]
    if after[run] >= 0:
        before[after[run]] = before[run]
    round_of_run[run] = target
    _link(run, target, members)


@numba.njit(cache=True)
def _link(run, target, members):
    head, after, before = members
    before[run], after[run] = -1, head[target]
    if head[target] >= 0:
        before[head[target]] = run
    head[target] = run
