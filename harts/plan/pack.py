"""Hierarchical bin packing: merge at the deepest branch point that fits.

From the leaves up, the groups of jobs below a branch point are packed into bins of a work capacity and a token limit
by first fit in descending order. Groups that do not merge travel up, and what lies above them is then computed once
more: merging deep saves the most.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem

FIT_RULES = FIRST_FIT, WORST_FIT = 0, 1
FEW = 32
"""Groups up to which sorting by insertion is used."""
UNLIMITED = 1 << 60
"""A work capacity that leaves the token limit alone to decide."""


class Trie(NamedTuple):
    """The branch points that packing has to decide at, and what it need not take apart below them.

    A subtree that fits a bin together with the path to it ends up in one bin, so it is one item (`I`); other items are
    single jobs.
    """

    parent_S: NDArray[np.int64]
    """[S] int64. Branch point above, smaller than the own number; S above the roots."""
    tokens_S: NDArray[np.int64]
    """[S + 1] int64. Tokens of the path to each branch point's end; 0 above the roots."""
    work_S: NDArray[np.int64]
    """[S + 1] int64. Their work."""
    above_I: NDArray[np.int64]
    """[I] int64. Branch point above each item."""
    tokens_I: NDArray[np.int64]
    """[I] int64. Tokens of each item's trie, the path to it included."""
    work_I: NDArray[np.int64]
    """[I] int64. Their work."""
    item_J: NDArray[np.int64]
    """[J] int64. Item of each job."""


class Groups(NamedTuple):
    """Groups of items, each named by one of them; lists of groups by branch point."""

    work_I: NDArray[np.int64]
    """Work of the group's trie, from the root on."""
    tokens_I: NDArray[np.int64]
    """Tokens of the group's trie."""
    capacity_I: NDArray[np.int64]
    """Most work; that of the item alone where it is more than the common capacity."""
    into_I: NDArray[np.int64]
    """Group that took this one in; itself if none did."""
    next_I: NDArray[np.int64]
    """Next group in the list of the branch point; -1 at its end."""
    list_S: NDArray[np.int64]
    """[S + 1, 2]. First and last group in the list of each branch point; -1 if it is empty."""
    least_S: NDArray[np.int64]
    """[S + 1, 4]. Two least works, then two least token counts, of the groups in the list of each branch point."""


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


def trie_of(problem: Problem, capacity: int, *, fraction: float = 1.0) -> Trie:
    """What has to be packed into bins of the problem's token limit and of no less work than `capacity`.

    Args:
        problem: The jobs.
        capacity: Units.
        fraction: Subtrees of more than this part of a bin are taken apart.
    """
    arrays = (problem.parent_S, problem.end_S, problem.size_S, problem.tail_J)
    most = (int(problem.limit * fraction), int(capacity * fraction))
    return Trie(*_contract(*arrays, problem.path_D, (problem.limit, capacity), most))


@numba.njit(cache=True)
def _contract(parent_S, end_S, size_S, tail_J, path_D, size, most):
    """The fields of a `Trie`."""
    segments, start_S = parent_S.size, end_S - size_S
    tokens_S, work_S = size_S.copy(), path_D[end_S] - path_D[start_S]  # of each segment and all below it
    is_leaf_S = np.ones(segments, dtype=np.bool_)
    for segment in range(segments - 1, -1, -1):
        parent = parent_S[segment]
        if parent >= 0:
            tokens_S[parent] += tokens_S[segment]
            work_S[parent] += work_S[segment]
            is_leaf_S[parent] = False
    is_item_S = is_leaf_S | (
        (start_S + tokens_S <= size[0])
        & (path_D[start_S] + work_S <= size[1])
        & (tokens_S <= most[0])
        & (work_S <= most[1])
    )
    items, branches = 0, 0
    number_S = np.empty(segments, dtype=np.int64)  # of the item or, less than zero, of the branch point
    segment_I, segment_V = np.empty(segments, dtype=np.int64), np.empty(segments, dtype=np.int64)
    for segment in range(segments):
        parent = parent_S[segment]
        if parent >= 0 and number_S[parent] >= 0:
            number_S[segment] = number_S[parent]
        elif is_item_S[segment]:
            number_S[segment] = items
            segment_I[items] = segment
            items += 1
        else:
            branches += 1
            number_S[segment] = -branches
            segment_V[branches - 1] = segment
    segment_I, segment_V = segment_I[:items], segment_V[:branches]
    above_I, above_V = np.full(items, branches, dtype=np.int64), np.full(branches, branches, dtype=np.int64)
    for segments_of, above in ((segment_I, above_I), (segment_V, above_V)):
        for i in range(segments_of.size):
            if parent_S[segments_of[i]] >= 0:
                above[i] = -number_S[parent_S[segments_of[i]]] - 1
    tokens_V = np.append(end_S[segment_V], 0)
    tokens_I = start_S[segment_I] + tokens_S[segment_I]
    work_I = path_D[start_S[segment_I]] + work_S[segment_I]
    return above_V, tokens_V, path_D[tokens_V], above_I, tokens_I, work_I, number_S[tail_J]


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
    groups.next_I[group] = -1
    if groups.list_S[segment, 0] < 0:
        groups.list_S[segment, 0] = group
    else:
        groups.next_I[groups.list_S[segment, 1]] = group
    groups.list_S[segment, 1] = group
    _note_least(groups.least_S, segment, groups.work_I[group], groups.tokens_I[group])


@numba.njit(cache=True)
def _pass_up(groups, segment, above):
    """Append the list of a segment to that of the one above."""
    first, last = groups.list_S[segment]
    if first < 0:
        return
    if groups.list_S[above, 0] < 0:
        groups.list_S[above, 0] = first
    else:
        groups.next_I[groups.list_S[above, 1]] = first
    groups.list_S[above, 1] = last
    for i in range(2):
        _note_least(groups.least_S, above, groups.least_S[segment, i], groups.least_S[segment, 2 + i])


@numba.njit(cache=True)
def set_room(bins, size, index, work, tokens):
    node = size + index
    bins.work[node], bins.tokens[node] = work, tokens
    node >>= 1
    while node > 0:
        bins.work[node] = max(bins.work[2 * node], bins.work[2 * node + 1])
        bins.tokens[node] = max(bins.tokens[2 * node], bins.tokens[2 * node + 1])
        node >>= 1


@numba.njit(cache=True)
def find_room(bins, size, work, tokens):
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
    members, work_I = bins.members, groups.work_I
    while group >= 0:
        place = count
        # Insertion is fastest for the few groups that most branch points have.
        while count < FEW and place > 0 and work_I[members[place - 1]] < work_I[group]:
            members[place] = members[place - 1]
            place -= 1
        members[place] = group
        count, group = count + 1, groups.next_I[group]
    if count > FEW:
        order = np.argsort(-work_I[members[:count]], kind="mergesort")
        members[:count] = members[:count][order]
    groups.list_S[segment] = -1
    groups.least_S[segment] = UNLIMITED
    return count


@numba.njit(cache=True)
def _join(groups, host, group, work, tokens):
    groups.into_I[group] = host
    groups.work_I[host] += work
    groups.tokens_I[host] += tokens


@numba.njit(cache=True)
def _merge_below(groups, bins, segment, shared, limit, rule):
    """Pack the groups of a segment's list; `shared` is the path's tokens and their work, common to all of them."""
    count = _take_list(groups, bins, segment)
    tokens_above, work_above = shared
    if count == 2:  # most branch points; that the two fit is why they are here
        host, group = bins.members[0], bins.members[1]
        _join(groups, host, group, groups.work_I[group] - work_above, groups.tokens_I[group] - tokens_above)
        bins.group[0] = host
        return 1
    size = 1
    while size < count:
        size *= 2
    bins.work[: 2 * size] = -1
    bins.tokens[: 2 * size] = -1
    opened = 0
    for group in bins.members[:count]:
        work, tokens = groups.work_I[group] - work_above, groups.tokens_I[group] - tokens_above
        index = -1
        if rule == WORST_FIT and opened > 0:
            index = _emptiest(bins, size)
            if bins.work[size + index] < work or bins.tokens[size + index] < tokens:
                index = -1
        if index < 0:
            index = find_room(bins, size, work, tokens)
        if index < 0:
            index = opened
            bins.group[index] = group
            opened += 1
        else:
            _join(groups, bins.group[index], group, work, tokens)
        host = bins.group[index]
        room = groups.capacity_I[host] - groups.work_I[host]
        set_room(bins, size, index, room, limit - groups.tokens_I[host])
    return opened


@numba.njit(cache=True)
def pack(trie, capacity, limit, rule, closed):
    """Pack items into bins.

    Args:
        trie: From `trie_of`.
        capacity: Work of a bin in units, no less than that of `trie_of`; a job of more gets a bin of its own size.
        limit: Tokens of a bin, at least those of the longest job.
        rule: FIRST_FIT or WORST_FIT.
        closed: Units. A bin with less room is not tried again further up.

    Returns:
        [I] int64, the bin of each item, numbered from 0 in the order of their first items, and [bins] int64, their
        work.
    """
    items, branches = trie.above_I.size, trie.parent_S.size
    groups = Groups(
        trie.work_I.copy(),
        trie.tokens_I.copy(),
        np.maximum(trie.work_I, capacity),
        np.arange(items),
        np.full(items, -1, dtype=np.int64),
        np.full((branches + 1, 2), -1, dtype=np.int64),
        np.full((branches + 1, 4), UNLIMITED, dtype=np.int64),
    )
    slots = 1
    while slots < items:
        slots *= 2
    room_work, room_tokens = np.empty(2 * slots, dtype=np.int64), np.empty(2 * slots, dtype=np.int64)
    group, members = np.empty(slots, dtype=np.int64), np.empty(items, dtype=np.int64)
    bins = Bins(room_work, room_tokens, group, np.empty(128, dtype=np.int64), members)
    for item in range(items):
        _append(groups, trie.above_I[item], item)
    for i in range(branches + 1):
        branch = branches - 1 - i if i < branches else branches  # the last stands above the roots
        tokens, work = trie.tokens_S[branch], trie.work_S[branch]
        least = groups.least_S[branch]
        if least[0] + least[1] - work <= capacity and least[2] + least[3] - tokens <= limit:
            opened = _merge_below(groups, bins, branch, (tokens, work), limit, rule)
            for group in bins.group[:opened]:
                if groups.capacity_I[group] - groups.work_I[group] >= closed:
                    _append(groups, branch, group)
        if i < branches:
            _pass_up(groups, branch, trie.parent_S[branch])
    return number_bins(groups.into_I, groups.work_I, items)


@numba.njit(cache=True)
def number_bins(into_G, work_G, items):
    """Follow the first `items` groups to those that took them in; returns what `pack` does."""
    number_G = np.full(into_G.size, -1, dtype=np.int64)
    bin_I = np.empty(items, dtype=np.int64)
    work_B = np.empty(items, dtype=np.int64)
    count = 0
    for item in range(items):
        host = item
        while into_G[host] != host:
            host = into_G[host]
        if number_G[host] < 0:
            number_G[host] = count
            work_B[count] = work_G[host]
            count += 1
        bin_I[item] = number_G[host]
        into_G[item] = host
    return bin_I, work_B[:count].copy()
