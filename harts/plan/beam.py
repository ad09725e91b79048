"""Hierarchical bin packing that keeps several alternatives for every subtree.

First fit (`harts.plan.pack`) merges whatever fits at the deepest branch point. Groups of more than half a bin then find
no partner further up, and bins stay a seventh empty. Whether it pays to leave two groups apart, so that one of them
fills a bin further up, shows only there. So each branch point hands up the few most promising ways to group what is
below it, no two of them alike in the sizes of what is open: a beam search (Lowerre, "The HARPY speech recognition
system", 1976), from the leaves up. What a group costs above its branch point is not known yet; it is charged the part
of the path that it takes of a bin.

Costs are integers, and what is computed in floats are products and quotients rounded down, so every machine packs
alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.pack import Bins, find_room, number_bins, set_room

BEAM = 6
"""Alternatives kept at a branch point."""
OPEN = 2
"""Groups of an alternative that may still take others in; the fullest of more are closed."""
FEW_CHILDREN = 3
"""Children up to which alternatives are combined; more are packed by first fit, each at its best."""
WHOLE = 1024
"""Parts of a bin are counted in so many."""
CLOSED = WHOLE - 20
"""A group that fills so much of a bin is closed."""
USABLE = WHOLE - 72
"""What bins are filled to in the end, to judge what a part of one will cost."""
ALIKE = 51
"""Alternatives are alike if all that is open differs by less than about so much."""


class Groups(NamedTuple):
    """Items that share a bin. The first are the items themselves."""

    tokens_G: NDArray[np.int64]
    """Tokens of the group's trie, the path from the root included."""
    work_G: NDArray[np.int64]
    """Their work."""
    parts_G: NDArray[np.int64]
    """[G, 2]. The groups that it was merged from."""


class States(NamedTuple):
    """Alternatives for a subtree. The first are the items, each a group of its own."""

    open_T: NDArray[np.int64]
    """[T, OPEN]. Groups that may take others in, then -1."""
    closed_T: NDArray[np.int64]
    """Cost of the groups that are full."""
    from_T: NDArray[np.int64]
    """[T, 2]. The alternatives of parts of the subtree that it consists of; -1 if they are known to be chosen."""
    made_T: NDArray[np.int64]
    """[T, 2]. First of the groups that it merged, and where they end."""


class Draft(NamedTuple):
    """The groups of an alternative that is looked at, the fullest first."""

    tokens: NDArray[np.int64]
    work: NDArray[np.int64]
    parts: NDArray[np.int64]
    """[2 OPEN, 2]. The groups that each is merged from; the second is -1 if it is not."""
    share: NDArray[np.int64]
    """What each takes of a bin, in `WHOLE`."""


class Place(NamedTuple):
    """A branch point and the bins."""

    tokens: int
    """Of the path to the branch point's end."""
    work: int
    tokens_above: int
    """Of the path to its parent's end."""
    work_above: int
    limit: int
    capacity: int
    price: int
    """Of a bin beside its work."""
    token_share: float
    """What a token takes of a bin below the path to the parent's end, in `WHOLE`."""
    work_share: float
    share_cost: float
    """What is above the branch point, and the price, of one of the `USABLE` shares of a bin."""


class Kept(NamedTuple):
    """The best alternatives so far, by ascending cost."""

    cost: NDArray[np.int64]
    key: NDArray[np.int64]
    """Alike for those whose open groups are alike."""
    how: NDArray[np.int64]
    """[BEAM, 3]. The two alternatives that each consists of, and the number of the matching."""


@numba.njit(cache=True)
def pack_alternatives(trie, capacity, limit, price):
    """Pack items into bins.

    Args:
        trie: From `trie_of`, with items that are small parts of a bin.
        capacity: Work of a bin in units, no less than that of `trie_of`; a job of more gets a bin of its own.
        limit: Tokens of a bin, at least those of the longest job.
        price: Units. What a bin costs beside its work.

    Returns:
        As `harts.plan.pack.pack`. Bins of one tree that are put together at the very end count what they share twice:
        they do less work than is returned.
    """
    items, branches = trie.above_I.size, trie.parent_S.size
    start_V, child_C = _children(trie.above_I, trie.parent_S)
    groups, states = _make(trie, items + BEAM * (items + branches))
    first_V, count_V = np.empty(branches + 1, dtype=np.int64), np.empty(branches + 1, dtype=np.int64)
    chosen, num_chosen = np.empty(items + branches + 1, dtype=np.int64), 0
    sizes = np.array([items, items])  # groups, states
    for branch in range(branches - 1, -1, -1):
        above = trie.parent_S[branch]
        here = (trie.tokens_S[branch], trie.work_S[branch])
        place = _place(here, (trie.tokens_S[above], trie.work_S[above]), (limit, capacity), price)
        children = child_C[start_V[branch] : start_V[branch + 1]]
        if children.size <= FEW_CHILDREN:
            first, count = _states_of(children[0], items, first_V, count_V)
            for child in children[1:]:
                other = _states_of(child, items, first_V, count_V)
                first, count = _combine(groups, states, (first, count), other, place, sizes)
        else:
            for child in children:
                chosen[num_chosen] = _states_of(child, items, first_V, count_V)[0]
                num_chosen += 1
            first, count = _pack_best(groups, states, chosen[num_chosen - children.size : num_chosen], place, sizes), 1
        first_V[branch], count_V[branch] = first, count
    for child in child_C[start_V[branches] :]:
        chosen[num_chosen] = _states_of(child, items, first_V, count_V)[0]
        num_chosen += 1
    into_G = _choose(groups, states, chosen[:num_chosen], sizes)
    _fill_up(groups, into_G, items, (limit, capacity), sizes)
    return number_bins(into_G, groups.work_G, items)


@numba.njit(cache=True)
def _place(here, above, most, price):
    """A branch point; each pair is of tokens and work."""
    (tokens, work), (tokens_above, work_above), (limit, capacity) = here, above, most
    token_share, work_share = WHOLE / max(limit - tokens_above, 1), WHOLE / max(capacity - work_above, 1)
    share_cost = (work_above + price) / USABLE
    return Place(tokens, work, tokens_above, work_above, limit, capacity, price, token_share, work_share, share_cost)


@numba.njit(cache=True)
def _children(above_I, parent_S):
    """Children of each branch point, by the place where they begin; branch point b is child I + b."""
    items, branches = above_I.size, parent_S.size
    start_V = np.zeros(branches + 3, dtype=np.int64)
    for above in (above_I, parent_S):
        for branch in above:
            start_V[branch + 2] += 1
    for branch in range(branches + 1):
        start_V[branch + 2] += start_V[branch + 1]
    child_C = np.empty(items + branches, dtype=np.int64)
    for begin, above in ((0, above_I), (items, parent_S)):
        for i in range(above.size):
            child_C[start_V[above[i] + 1]] = begin + i
            start_V[above[i] + 1] += 1
    return start_V, child_C


@numba.njit(cache=True)
def _make(trie, most):
    """Items as groups and as alternatives, and room for `most` alternatives and the groups that they merge."""
    items = trie.above_I.size
    room = most * OPEN + items
    groups = Groups(np.empty(room, dtype=np.int64), np.empty(room, dtype=np.int64), np.empty((room, 2), dtype=np.int64))
    groups.tokens_G[:items], groups.work_G[:items] = trie.tokens_I, trie.work_I
    states = States(
        np.full((most, OPEN), -1, dtype=np.int64),
        np.zeros(most, dtype=np.int64),
        np.full((most, 2), -1, dtype=np.int64),
        np.zeros((most, 2), dtype=np.int64),
    )
    states.open_T[:items, 0] = np.arange(items)
    return groups, states


@numba.njit(cache=True)
def _states_of(child, items, first_V, count_V):
    """First alternative of a child, and how many it has; the first is the best."""
    if child < items:
        return child, 1
    return first_V[child - items], count_V[child - items]


@numba.njit(cache=True)
def _combine(groups, states, one, other, place, sizes):
    """Keep the best alternatives that consist of one of each of two parts; returns the first and how many."""
    draft = Draft(
        np.empty(2 * OPEN, dtype=np.int64),
        np.empty(2 * OPEN, dtype=np.int64),
        np.empty((2 * OPEN, 2), dtype=np.int64),
        np.empty(2 * OPEN, dtype=np.int64),
    )
    kept = Kept(np.empty(BEAM, dtype=np.int64), np.empty(BEAM, dtype=np.int64), np.empty((BEAM, 3), dtype=np.int64))
    count = 0
    # A merge saves the branch point's own tokens, what they take of a bin, and at most what a full one is not charged.
    share = _share(place.tokens, place.work, place) + 2 + WHOLE - USABLE
    saved = OPEN * (place.work - place.work_above + int(place.share_cost * share) + 3)
    for a in range(one[0], one[0] + one[1]):
        apart_a = _apart(groups, states, a, place)
        for b in range(other[0], other[0] + other[1]):
            if count == BEAM and apart_a + _apart(groups, states, b, place) - saved >= kept.cost[count - 1]:
                continue
            for matching in range((OPEN + 1) ** OPEN):
                number = _match(groups, states, (a, b, matching), place, draft)
                if number >= 0:
                    cost, key = _judge(draft, number, place)
                    cost += states.closed_T[a] + states.closed_T[b]
                    count = _keep(kept, count, (cost, key), (a, b, matching))
    first = sizes[1]
    for i in range(count):
        a, b, matching = kept.how[i, 0], kept.how[i, 1], kept.how[i, 2]
        number = _match(groups, states, (a, b, matching), place, draft)
        _store(groups, states, draft, number, place, sizes)
        states.from_T[sizes[1] - 1] = a, b
        states.closed_T[sizes[1] - 1] += states.closed_T[a] + states.closed_T[b]
    return first, count


@numba.njit(cache=True)
def _apart(groups, states, state, place):
    """Cost of an alternative if nothing is merged with its groups, and none is closed."""
    cost = states.closed_T[state]
    for i in range(OPEN):
        group = states.open_T[state, i]
        if group >= 0:
            tokens, work = groups.tokens_G[group], groups.work_G[group]
            cost += work - place.work_above + int(place.share_cost * min(_share(tokens, work, place), USABLE))
    return cost


@numba.njit(cache=True)
def _match(groups, states, how, place, draft):
    """Draft the groups of two alternatives of which some are merged; returns their number, -1 if they do not fit."""
    a, b, matching = how
    count, used = 0, 0
    for i in range(OPEN):
        group = states.open_T[a, i]
        partner = matching % (OPEN + 1) - 1
        matching //= OPEN + 1
        other = states.open_T[b, partner] if partner >= 0 else -1
        if group < 0:
            if partner >= 0:
                return -1
            continue
        if partner >= 0 and (other < 0 or used >> partner & 1):
            return -1
        tokens, work = groups.tokens_G[group], groups.work_G[group]
        if other >= 0:
            used |= 1 << partner
            tokens += groups.tokens_G[other] - place.tokens
            work += groups.work_G[other] - place.work
            if tokens > place.limit or work > place.capacity:
                return -1
        count = _insert(draft, count, (tokens, work), (group, other), place)
    for partner in range(OPEN):
        group = states.open_T[b, partner]
        if group >= 0 and not used >> partner & 1:
            count = _insert(draft, count, (groups.tokens_G[group], groups.work_G[group]), (group, -1), place)
    return count


@numba.njit(cache=True)
def _share(tokens, work, place):
    """What a group takes of a bin below the path to the parent's end, in `WHOLE`."""
    share = max((tokens - place.tokens_above) * place.token_share, (work - place.work_above) * place.work_share)
    return int(min(share, 1.0 * WHOLE))


@numba.njit(cache=True)
def _insert(draft, count, size, parts, place):
    """Add a group to the draft, the fullest first; returns how many there are."""
    tokens, work = size
    share, i = _share(tokens, work, place), count
    while i > 0 and draft.share[i - 1] < share:
        draft.tokens[i], draft.work[i], draft.share[i] = draft.tokens[i - 1], draft.work[i - 1], draft.share[i - 1]
        draft.parts[i, 0], draft.parts[i, 1] = draft.parts[i - 1, 0], draft.parts[i - 1, 1]
        i -= 1
    draft.tokens[i], draft.work[i], draft.share[i] = tokens, work, share
    draft.parts[i, 0], draft.parts[i, 1] = parts
    return count + 1


@numba.njit(cache=True)
def _is_closed(draft, i, count):
    """Whether a group of the draft takes no others in: it is nearly full, or enough emptier ones stay open."""
    return draft.share[i] >= CLOSED or i < count - OPEN


@numba.njit(cache=True)
def _judge(draft, count, place):
    """Cost of the groups in the draft, as far as it is known, and a key of the open ones."""
    cost, key = 0, 0
    for i in range(count):
        if _is_closed(draft, i, count):
            cost += draft.work[i] + place.price
        else:
            part = min(draft.share[i], USABLE)
            cost += draft.work[i] - place.work_above + int(place.share_cost * part)
            key = key * (WHOLE // ALIKE + 2) + draft.share[i] // ALIKE + 1
    return cost, key


@numba.njit(cache=True)
def _keep(kept, count, judged, how):
    """Insert an alternative, unless one that is alike or enough others are better; returns how many there are."""
    cost, key = judged
    last = count
    for i in range(count):
        if kept.key[i] == key:
            if kept.cost[i] <= cost:
                return count
            last = i  # gives way
            break
    if last == count:
        if count == BEAM:
            if kept.cost[count - 1] <= cost:
                return count
            last = count - 1
        else:
            count += 1
    while last > 0 and kept.cost[last - 1] > cost:
        kept.cost[last], kept.key[last] = kept.cost[last - 1], kept.key[last - 1]
        for i in range(3):
            kept.how[last, i] = kept.how[last - 1, i]
        last -= 1
    kept.cost[last], kept.key[last] = cost, key
    kept.how[last, 0], kept.how[last, 1], kept.how[last, 2] = how
    return count


@numba.njit(cache=True)
def _store(groups, states, draft, count, place, sizes):
    """Make the draft an alternative, and its merged groups groups."""
    state = sizes[1]
    sizes[1] += 1
    states.made_T[state, 0] = sizes[0]
    num_open = 0
    for i in range(count):
        group = draft.parts[i, 0]
        if draft.parts[i, 1] >= 0:
            group = _merge(groups, (draft.parts[i, 0], draft.parts[i, 1]), (draft.tokens[i], draft.work[i]), sizes)
        if _is_closed(draft, i, count):
            states.closed_T[state] += draft.work[i] + place.price
        else:
            states.open_T[state, num_open] = group
            num_open += 1
    states.made_T[state, 1] = sizes[0]


@numba.njit(cache=True)
def _merge(groups, parts, size, sizes):
    group = sizes[0]
    sizes[0] += 1
    groups.parts_G[group, 0], groups.parts_G[group, 1] = parts
    groups.tokens_G[group], groups.work_G[group] = size
    return group


@numba.njit(cache=True)
def _pack_best(groups, states, chosen, place, sizes):
    """Pack what is open in the best alternatives of many children; returns the alternative."""
    open_G, count, closed = np.empty(OPEN * chosen.size, dtype=np.int64), 0, 0
    for state in chosen:
        closed += states.closed_T[state]
        for group in states.open_T[state]:
            if group >= 0:
                open_G[count] = group
                count += 1
    state, made = sizes[1], sizes[0]
    sizes[1] += 1
    bin_B = _first_fit(groups, open_G[:count], (place.tokens, place.work), (place.limit, place.capacity), sizes)
    states.made_T[state] = made, sizes[0]
    share_B = np.empty(bin_B.size, dtype=np.int64)
    for i in range(bin_B.size):
        share_B[i] = _share(groups.tokens_G[bin_B[i]], groups.work_G[bin_B[i]], place)
    num_open = 0
    for i, number in enumerate(np.argsort(share_B, kind="mergesort")):
        if share_B[number] >= CLOSED or i >= OPEN:
            closed += groups.work_G[bin_B[number]] + place.price
        else:
            states.open_T[state, num_open] = bin_B[number]
            num_open += 1
    states.closed_T[state] = closed
    return state


@numba.njit(cache=True)
def _first_fit(groups, member_G, shared, most, sizes):
    """Merge groups by first fit in descending order; returns the merged ones.

    Args:
        groups: All groups.
        member_G: Those to merge.
        shared: Tokens and work that are common to all of them.
        most: Tokens and work of a bin.
        sizes: As in `pack_alternatives`.
    """
    order_G = member_G[np.argsort(-groups.work_G[member_G], kind="mergesort")]
    size = 1
    while size < order_G.size:
        size *= 2
    room_work, room_tokens = np.full(2 * size, -1, dtype=np.int64), np.full(2 * size, -1, dtype=np.int64)
    bins = Bins(room_work, room_tokens, np.empty(size, dtype=np.int64), np.empty(128, dtype=np.int64), order_G)
    opened = 0
    for group in order_G:
        tokens, work = groups.tokens_G[group] - shared[0], groups.work_G[group] - shared[1]
        index = find_room(bins, size, work, tokens)
        if index < 0:
            index = opened
            bins.group[index] = group
            opened += 1
        else:
            host = bins.group[index]
            total = (groups.tokens_G[host] + tokens, groups.work_G[host] + work)
            bins.group[index] = _merge(groups, (host, group), total, sizes)
        host = bins.group[index]
        set_room(bins, size, index, most[1] - groups.work_G[host], most[0] - groups.tokens_G[host])
    return bins.group[:opened]


@numba.njit(cache=True)
def _fill_up(groups, into_G, items, most, sizes):
    """Merge whole groups by first fit where they share nothing, full ones of large trees with small trees."""
    last_G, count = np.empty(items, dtype=np.int64), 0
    is_listed_G = np.zeros(into_G.size, dtype=np.bool_)
    for item in range(items):
        group = item
        while into_G[group] != group:
            group = into_G[group]
        if not is_listed_G[group]:
            is_listed_G[group] = True
            last_G[count] = group
            count += 1
    made = sizes[0]
    _first_fit(groups, last_G[:count], (0, 0), most, sizes)
    for group in range(made, sizes[0]):
        into_G[groups.parts_G[group, 0]] = group
        into_G[groups.parts_G[group, 1]] = group


@numba.njit(cache=True)
def _choose(groups, states, chosen, sizes):
    """The group that each was merged into in the chosen alternatives and those that they consist of; itself if none."""
    into_G = np.arange(groups.work_G.size)
    stack = np.empty(sizes[1], dtype=np.int64)
    top = chosen.size
    stack[:top] = chosen
    while top > 0:
        top -= 1
        state = stack[top]
        for group in range(states.made_T[state, 0], states.made_T[state, 1]):
            into_G[groups.parts_G[group, 0]] = group
            into_G[groups.parts_G[group, 1]] = group
        for i in range(2):
            part = states.from_T[state, i]
            if part >= 0:
                stack[top] = part
                top += 1
    return into_G
