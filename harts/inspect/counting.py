"""Compiled loops over spans and segments: which tokens are trained, and histograms of lengths.

Kept out of the other modules so that importing `harts` does not import numba.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(cache=True)
def spans_of_mask(mask_F: NDArray[np.bool_], offsets: NDArray[np.int64]):
    """Half-open spans of True in slices of a flat array.

    Args:
        mask_F: [F] bool.
        offsets: [N + 1] int64. Slice `i` is `mask_F[offsets[i]:offsets[i + 1]]`.

    Returns:
        [spans] int64 each: number of the slice, first place in it, one past the last place; ascending.
    """
    slices, begins, ends = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    for fill in (False, True):
        found = 0
        for i in range(offsets.size - 1):
            before = False
            for t in range(offsets[i], offsets[i + 1]):
                if mask_F[t] and not before:
                    if fill:
                        slices[found], begins[found] = i, t - offsets[i]
                    found += 1
                if fill and before and not mask_F[t]:
                    ends[found - 1] = t - offsets[i]
                before = mask_F[t]
            if fill and before:
                ends[found - 1] = offsets[i + 1] - offsets[i]
        if not fill:
            slices, begins, ends = np.empty(found, np.int64), np.empty(found, np.int64), np.empty(found, np.int64)
    return slices, begins, ends


@numba.njit(cache=True)
def spans_on_segments(segments, tail_N, spans):
    """Cut spans of trajectories at the ends of segments.

    Args:
        segments: `parent_S`, `start_S` and `end_S` of a tree.
        tail_N: [N] int64, of the tree.
        spans: [spans] int64 each: place of the trajectory in the tree's order, begin and end; ascending in the begin
            for each trajectory.

    Returns:
        [pieces] int64 each: segment, begin and end as depths; a token that several trajectories train is in several.
    """
    parent_S, start_S, end_S = segments
    place, begins, ends = spans
    owner, first, last = np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    for fill in (False, True):
        found = 0
        segment = -1
        for i in range(place.size - 1, -1, -1):
            # From the last span to the first, so that a path is climbed once, unless spans overlap.
            if i == place.size - 1 or place[i] != place[i + 1] or ends[i] > begins[i + 1]:
                segment = tail_N[place[i]]
            while segment >= 0 and start_S[segment] >= ends[i]:
                segment = parent_S[segment]
            above = segment
            while above >= 0 and end_S[above] > begins[i]:
                if fill:
                    owner[found] = above
                    first[found], last[found] = max(begins[i], start_S[above]), min(ends[i], end_S[above])
                found += 1
                segment = above
                above = parent_S[above]
        if not fill:
            owner, first, last = np.empty(found, np.int64), np.empty(found, np.int64), np.empty(found, np.int64)
    return owner, first, last


@numba.njit(cache=True)
def covered_of_segments(owner, first, last, count):
    """Tokens of each segment that are in at least one piece.

    Args:
        owner: [pieces] int64. Segment of each, ascending.
        first: [pieces] int64. Ascending for each segment.
        last: [pieces] int64. One past the last depth.
        count: S.
    """
    covered_S = np.zeros(count, dtype=np.int64)
    reached = 0
    for i in range(owner.size):
        if i == 0 or owner[i] != owner[i - 1]:
            reached = 0
        if last[i] > reached:
            covered_S[owner[i]] += last[i] - max(first[i], reached)
            reached = last[i]
    return covered_S


@numba.njit(cache=True)
def add_to_histogram(counts: NDArray[np.int64], values: NDArray[np.int64], bits: int) -> None:
    """Count values in bins of `bits` leading binary digits, in place; bin numbers as in `Histogram`."""
    for value in values:
        shift = 0
        while value >> shift >= 2 << bits:
            shift += 1
        counts[(shift << bits) + (value >> shift)] += 1
