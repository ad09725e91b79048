"""LCP merge sort and the segments of a sorted list, compiled.

Merge sort that keeps, for the head of each run, how much it shares with the last trajectory put out (Ng and Kakehi,
"Merging string sequences by longest common prefixes", 2008). Tokens are compared only where both heads share equally
much, and from there on, so no token is compared twice to the same end: O(N log N) steps and one pass over the
prefixes that tell trajectories apart. Kept out of `lcp.py` so that importing `harts` does not import numba.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

BLOCK = 32
"""Tokens compared at once; LLVM turns a block into a few vector instructions."""


@numba.njit(cache=True)
def _common(values_F: NDArray[np.integer], a: int, b: int, length: int) -> int:
    """How many of `length` values from `a` on equal those from `b` on."""
    one, other = values_F[a : a + length], values_F[b : b + length]
    done = 0
    while done + BLOCK <= length:
        differ = one[done] ^ other[done]
        for i in range(1, BLOCK):
            differ |= one[done + i] ^ other[done + i]
        if differ != 0:
            break
        done += BLOCK
    while done < length and one[done] == other[done]:
        done += 1
    return done


@numba.njit(cache=True)
def _compare(tokens_F: NDArray[np.integer], keys_F: NDArray[np.integer], a: int, b: int, length: int):
    """Shared (token, key) pairs of two slices, and whether the second is smaller at the first pair that differs."""
    shared = _common(tokens_F, a, b, length)
    if keys_F.size > 0:
        shared = _common(keys_F, a, b, shared)
    if shared == length:
        return shared, False
    if tokens_F[a + shared] != tokens_F[b + shared]:
        return shared, tokens_F[b + shared] < tokens_F[a + shared]
    return shared, keys_F[b + shared] < keys_F[a + shared]


@numba.njit(cache=True)
def _merge(tokens_F, keys_F, offsets, source, target, bounds):
    """Merge two neighbouring sorted runs; `source` and `target` are (order, lcp) pairs."""
    order, lcp = source
    order_out, lcp_out = target
    i, middle, end = bounds
    j, out = middle, bounds[0]
    shared_i, shared_j = 0, 0  # of each head with the last one put out
    while i < middle and j < end:
        take_j = shared_j > shared_i
        shared = max(shared_i, shared_j)
        if shared_i == shared_j:
            a, b = offsets[order[i]], offsets[order[j]]
            length_a, length_b = offsets[order[i] + 1] - a, offsets[order[j] + 1] - b
            rest = min(length_a, length_b) - shared
            more, take_j = _compare(tokens_F, keys_F, a + shared, b + shared, rest)
            if more == rest:
                take_j = length_b < length_a
            if take_j:
                shared_i = shared + more
            else:
                shared_j = shared + more
        lcp_out[out] = shared
        if take_j:
            order_out[out] = order[j]
            j += 1
            shared_j = lcp[j] if j < end else 0
        else:
            order_out[out] = order[i]
            i += 1
            shared_i = lcp[i] if i < middle else 0
        out += 1
    # What is left of one run keeps its order; only its head now has another trajectory before it.
    first, last, shared = (i, middle, shared_i) if i < middle else (j, end, shared_j)
    for k in range(first, last):
        order_out[out] = order[k]
        lcp_out[out] = shared if k == first else lcp[k]
        out += 1


@numba.njit(cache=True)
def merge_sort(tokens_F, keys_F, offsets):
    """Sort slices of a flat array.

    Args:
        tokens_F: [F] int32 or int64.
        keys_F: [F] of the same type, compared where tokens are equal; empty if there is none.
        offsets: [N + 1] int64. Slice `i` is `tokens_F[offsets[i]:offsets[i + 1]]`; empty ones come first.

    Returns:
        `order_N` and `lcp_N` as `sort_with_lcp` documents them.
    """
    count = offsets.size - 1
    order, lcp = np.arange(count), np.zeros(count, dtype=np.int64)
    order_out, lcp_out = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            bounds = (begin, min(begin + width, count), min(begin + 2 * width, count))
            _merge(tokens_F, keys_F, offsets, (order, lcp), (order_out, lcp_out), bounds)
        order, order_out = order_out, order
        lcp, lcp_out = lcp_out, lcp
        width *= 2
    return order, lcp


@numba.njit(cache=True)
def _pieces(length_N, lcp_N):
    """For each trajectory, the one whose new tokens hold the last token shared with the one before (-1 if none), and
    how many segments the new tokens of each are cut into."""
    count = length_N.size
    piece_N = np.full(count, -1, dtype=np.int64)
    segments_N = np.zeros(count, dtype=np.int64)
    lowest_N = length_N.copy()  # where the last cut of each piece fell
    path = np.empty(count, dtype=np.int64)  # pieces of the path to the current trajectory, from the root on
    depth = 0
    for i in range(count):
        while depth > 0 and lcp_N[path[depth - 1]] >= lcp_N[i]:
            depth -= 1
        if depth > 0:
            piece = path[depth - 1]
            piece_N[i] = piece
            if lcp_N[i] < lowest_N[piece]:
                lowest_N[piece] = lcp_N[i]
                segments_N[piece] += 1
        if length_N[i] > lcp_N[i]:
            path[depth] = i
            depth += 1
            segments_N[i] += 1
    return piece_N, segments_N


@numba.njit(cache=True)
def find_segments(length_N, lcp_N):
    """The segments of a sorted list, in pre-order. O(N).

    Args:
        length_N: [N] int64, >= 1.
        lcp_N: [N] int64, of a sorted list.

    Returns:
        `parent_S`, `start_S`, `end_S`, `multiplicity_S` and `tail_N`, as `PrefixTree` documents them.
    """
    piece_N, segments_N = _pieces(length_N, lcp_N)
    last_N = np.cumsum(segments_N) - 1  # segment at the bottom of each piece
    count = last_N[-1] + 1
    parent_S, start_S, end_S = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    multiplicity_S = np.zeros(count, dtype=np.int64)
    tail_N = np.empty(length_N.size, dtype=np.int64)
    top_N = last_N.copy()  # segment of each piece that was cut last
    for i in range(length_N.size):
        fork = -1
        if piece_N[i] >= 0:
            # Later trajectories leave a piece further up, so its segments are found from the bottom.
            fork = top_N[piece_N[i]]
            if lcp_N[i] < end_S[fork]:
                start_S[fork] = lcp_N[i]
                end_S[fork - 1] = lcp_N[i]
                parent_S[fork - 1], parent_S[fork] = parent_S[fork], fork - 1
                start_S[fork - 1] = lcp_N[piece_N[i]]
                fork -= 1
                top_N[piece_N[i]] = fork
        tail_N[i] = fork
        if length_N[i] > lcp_N[i]:
            tail_N[i] = last_N[i]
            parent_S[last_N[i]], start_S[last_N[i]], end_S[last_N[i]] = fork, lcp_N[i], length_N[i]
        multiplicity_S[tail_N[i]] += 1
    for segment in range(count - 1, -1, -1):
        if parent_S[segment] >= 0:
            multiplicity_S[parent_S[segment]] += multiplicity_S[segment]
    return parent_S, start_S, end_S, multiplicity_S, tail_N
