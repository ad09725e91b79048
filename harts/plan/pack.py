"""Hierarchical bin packing: merge at the deepest branch point that fits.

From the leaves up, the groups of jobs below a branch point are packed into bins of a work capacity and a token limit
by first fit in descending order. Groups that do not merge travel up, and what lies above them is then computed once
more: merging deep saves the most. Bisection finds the least capacity that needs no more bins than there are slots of
ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem

RULES = FIRST_FIT, WORST_FIT = 0, 1
FEW = 32
"""Groups up to which sorting by insertion is used."""
UNLIMITED = 1 << 60
"""A work capacity that leaves the token limit alone to decide."""


class Trie(NamedTuple):
    """What packing reads of a `Problem`."""

    parent_S: NDArray[np.int64]
    end_S: NDArray[np.int64]
    tail_J: NDArray[np.int64]
    length_J: NDArray[np.int64]
    path_D: NDArray[np.int64]


class Groups(NamedTuple):
    """Groups of jobs, each named by one of them; lists of groups by segment."""

    work_J: NDArray[np.int64]
    """Work of the group's trie, from the root on."""
    tokens_J: NDArray[np.int64]
    """Tokens of the group's trie."""
    capacity_J: NDArray[np.int64]
    """Most work; that of the job alone where it is more than the common capacity."""
    into_J: NDArray[np.int64]
    """Group that took this one in; itself if none did."""
    next_J: NDArray[np.int64]
    """Next group in the list of the segment; -1 at its end."""
    list_S: NDArray[np.int64]
    """[S + 1, 2]. First and last group in the list of each segment; -1 if it is empty."""
    least_S: NDArray[np.int64]
    """[S + 1, 4]. Two least works, then two least token counts, of the groups in the list of each segment."""


class Bins(NamedTuple):
    """Tournament trees over the bins of one branch point: each node holds the most free room below it."""

    work: NDArray[np.int64]
    tokens: NDArray[np.int64]
    group: NDArray[np.int64]
    """Group of each open bin."""
    stack: NDArray[np.int64]
    """Nodes to visit."""
    members: NDArray[np.int64]
    """Groups to place."""


def trie_of(problem: Problem) -> Trie:
    """The part of a problem that compiled code reads."""
    return Trie(problem.parent_S, problem.end_S, problem.tail_J, problem.length_J, problem.path_D)


@numba.njit(cache=True)
def _note_least(least_S, segment, work, tokens):
    for column, value in ((0, work), (2, tokens)):
        if value < least_S[segment, column]:
            least_S[segment, column + 1] = least_S[segment, column]
            least_S[segment, column] = value
        elif value < least_S[segment, column + 1]:
            least_S[segment, column + 1] = value


@numba.njit(cache=True)
def _append(groups, segment, group):
    groups.next_J[group] = -1
    if groups.list_S[segment, 0] < 0:
        groups.list_S[segment, 0] = group
    else:
        groups.next_J[groups.list_S[segment, 1]] = group
    groups.list_S[segment, 1] = group
    _note_least(groups.least_S, segment, groups.work_J[group], groups.tokens_J[group])


@numba.njit(cache=True)
def _pass_up(groups, segment, above):
    """Append the list of a segment to that of the one above."""
    first, last = groups.list_S[segment]
    if first < 0:
        return
    if groups.list_S[above, 0] < 0:
        groups.list_S[above, 0] = first
    else:
        groups.next_J[groups.list_S[above, 1]] = first
    groups.list_S[above, 1] = last
    for i in range(2):
        _note_least(groups.least_S, above, groups.least_S[segment, i], groups.least_S[segment, 2 + i])


@numba.njit(cache=True)
def _set_room(bins, size, index, work, tokens):
    node = size + index
    bins.work[node], bins.tokens[node] = work, tokens
    node >>= 1
    while node > 0:
        bins.work[node] = max(bins.work[2 * node], bins.work[2 * node + 1])
        bins.tokens[node] = max(bins.tokens[2 * node], bins.tokens[2 * node + 1])
        node >>= 1


@numba.njit(cache=True)
def _find_room(bins, size, work, tokens):
    """The first bin with room for both, or -1."""
    top = 1
    bins.stack[0] = 1
    while top > 0:
        top -= 1
        node = bins.stack[top]
        if bins.work[node] < work or bins.tokens[node] < tokens:
            continue
        if node >= size:
            return node - size
        bins.stack[top], bins.stack[top + 1] = 2 * node + 1, 2 * node
        top += 2
    return -1


@numba.njit(cache=True)
def _emptiest(bins, size):
    node = 1
    while node < size:
        node *= 2
        if bins.work[node + 1] > bins.work[node]:
            node += 1
    return node - size


@numba.njit(cache=True)
def _take_list(groups, bins, segment):
    """Move the groups of a segment from its list to `bins.members`, by descending work; returns their number."""
    count, group = 0, groups.list_S[segment, 0]
    members, work_J = bins.members, groups.work_J
    while group >= 0:
        place = count
        # Insertion is fastest for the few groups that most branch points have.
        while count < FEW and place > 0 and work_J[members[place - 1]] < work_J[group]:
            members[place] = members[place - 1]
            place -= 1
        members[place] = group
        count, group = count + 1, groups.next_J[group]
    if count > FEW:
        order = np.argsort(-work_J[members[:count]], kind="mergesort")
        members[:count] = members[:count][order]
    groups.list_S[segment] = -1
    groups.least_S[segment] = UNLIMITED
    return count


@numba.njit(cache=True)
def _join(groups, host, group, work, tokens):
    groups.into_J[group] = host
    groups.work_J[host] += work
    groups.tokens_J[host] += tokens


@numba.njit(cache=True)
def _merge_below(groups, bins, segment, shared, limit, rule):
    """Pack the groups of a segment's list; `shared` is the path's tokens and their work, common to all of them."""
    count = _take_list(groups, bins, segment)
    tokens_above, work_above = shared
    if count == 2:  # most branch points; that the two fit is why they are here
        host, group = bins.members[0], bins.members[1]
        _join(groups, host, group, groups.work_J[group] - work_above, groups.tokens_J[group] - tokens_above)
        bins.group[0] = host
        return 1
    size = 1
    while size < count:
        size *= 2
    bins.work[: 2 * size] = -1
    bins.tokens[: 2 * size] = -1
    opened = 0
    for group in bins.members[:count]:
        work, tokens = groups.work_J[group] - work_above, groups.tokens_J[group] - tokens_above
        index = -1
        if rule == WORST_FIT and opened > 0:
            index = _emptiest(bins, size)
            if bins.work[size + index] < work or bins.tokens[size + index] < tokens:
                index = -1
        if index < 0:
            index = _find_room(bins, size, work, tokens)
        if index < 0:
            index = opened
            bins.group[index] = group
            opened += 1
        else:
            _join(groups, bins.group[index], group, work, tokens)
        host = bins.group[index]
        room = groups.capacity_J[host] - groups.work_J[host]
        _set_room(bins, size, index, room, limit - groups.tokens_J[host])
    return opened


@numba.njit(cache=True)
def pack(trie, capacity, limit, rule, closed):
    """Pack jobs into bins.

    Args:
        trie: From `trie_of`.
        capacity: Work of a bin in units; a job of more gets a bin of its own size.
        limit: Tokens of a bin, at least those of the longest job.
        rule: FIRST_FIT or WORST_FIT.
        closed: Units. A bin with less room is not tried again further up.

    Returns:
        [J] int64, the bin of each job, numbered from 0 in the order of their first jobs, and [bins] int64, their work.
    """
    jobs, segments = trie.tail_J.size, trie.parent_S.size
    work_J = trie.path_D[trie.length_J]
    groups = Groups(
        work_J,
        trie.length_J.copy(),
        np.maximum(work_J, capacity),
        np.arange(jobs),
        np.full(jobs, -1, dtype=np.int64),
        np.full((segments + 1, 2), -1, dtype=np.int64),
        np.full((segments + 1, 4), UNLIMITED, dtype=np.int64),
    )
    slots = 1
    while slots < jobs:
        slots *= 2
    room_work, room_tokens = np.empty(2 * slots, dtype=np.int64), np.empty(2 * slots, dtype=np.int64)
    group, members = np.empty(slots, dtype=np.int64), np.empty(jobs, dtype=np.int64)
    bins = Bins(room_work, room_tokens, group, np.empty(128, dtype=np.int64), members)
    for job in range(jobs):
        _append(groups, trie.tail_J[job], job)
    for i in range(segments + 1):
        segment = segments - 1 - i if i < segments else segments  # the last stands above the roots
        tokens, above = 0, segments
        if i < segments:
            tokens = trie.end_S[segment]
            above = trie.parent_S[segment] if trie.parent_S[segment] >= 0 else segments
        least = groups.least_S[segment]
        work = trie.path_D[tokens]
        if least[0] + least[1] - work <= capacity and least[2] + least[3] - tokens <= limit:
            opened = _merge_below(groups, bins, segment, (tokens, work), limit, rule)
            for group in bins.group[:opened]:
                if groups.capacity_J[group] - groups.work_J[group] >= closed:
                    _append(groups, segment, group)
        if i < segments:
            _pass_up(groups, segment, above)
    return _number_bins(groups.into_J, work_J)


@numba.njit(cache=True)
def _number_bins(into_J, work_J):
    number_J = np.full(into_J.size, -1, dtype=np.int64)
    bin_J = np.empty(into_J.size, dtype=np.int64)
    work_B = np.empty(into_J.size, dtype=np.int64)
    count = 0
    for job in range(into_J.size):
        host = job
        while into_J[host] != host:
            host = into_J[host]
        if number_J[host] < 0:
            number_J[host] = count
            work_B[count] = work_J[host]
            count += 1
        bin_J[job] = number_J[host]
        into_J[job] = host
    return bin_J, work_B[:count].copy()


def pack_tokens(problem: Problem, *, rule: int) -> NDArray[np.int64]:
    """[J] int64, the bin of each job where the token limit alone opens bins: few bins, little work."""
    bin_J, _ = pack(trie_of(problem), UNLIMITED, problem.limit, rule, 0)
    return bin_J


def pack_slots(
    problem: Problem, *, num_slots: int, guess: int, rule: int, tolerance: float
) -> NDArray[np.int64] | None:
    """Pack into `num_slots` slots of all ranks, at nearly the least capacity that first or worst fit allows.

    Args:
        problem: The jobs.
        num_slots: >= 1, enough for `pack_tokens` with the same rule.
        guess: Units. A capacity that should be a little too small, such as an even share of a lower bound.
        rule: FIRST_FIT or WORST_FIT.
        tolerance: Capacities are tried until they differ by less than this part.

    Returns:
        [J] int64, bins, the best of the packings met; None if even a capacity several times the guess
        does not give so few.
    """
    trie, most = trie_of(problem), num_slots * problem.ranks
    makespan, best = UNLIMITED, None
    low, high = 0, max(guess, 1)
    growth = high // 64 + 1
    is_bracketed = False
    while not is_bracketed or high - low > max(1, high * tolerance):
        capacity = (low + high) // 2 if is_bracketed else high
        bin_J, work_B = pack(trie, capacity, problem.limit, rule, int(capacity * tolerance / 2))
        is_bracketed = is_bracketed or work_B.size <= most
        if work_B.size > most:
            low = capacity
            if not is_bracketed and high > 4 * guess:
                return None
            if not is_bracketed:
                high, growth = high + growth, growth * 2
            continue
        high = capacity
        height = int(np.sort(work_B)[::-1][:: problem.ranks].sum())
        if height + -(-work_B.size // problem.ranks) * problem.overhead < makespan:
            makespan, best = height + -(-work_B.size // problem.ranks) * problem.overhead, bin_J
    return best
