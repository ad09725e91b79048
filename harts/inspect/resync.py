"""Where two token sequences go on alike after a difference, compiled."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

GRAM = 16
"""Tokens that are hashed together."""


@numba.njit(cache=True)
def resync(one: NDArray[np.int64], other: NDArray[np.int64], least: int, window: int) -> tuple[int, int, int]:
    """Skip as few tokens as possible, of both together, so that the rest begins alike.

    Args:
        one: [n] int64.
        other: [m] int64.
        least: Equal tokens that count; all that is left of one of the two counts as well if it is at least `GRAM`.
        window: Most tokens skipped of each.

    Returns:
        Tokens skipped of each and the number of equal tokens that follow; zeros if there is no such place.

    Example:
        >>> resync(np.array([7, *range(20)]), np.arange(20), 16, 8)
        (1, 0, 20)
    """
    a, b = _hashes(one, window), _hashes(other, window)
    order = np.argsort(b, kind="mergesort")  # stable: equal hashes by place
    ordered = b[order]
    best = (0, 0, 0)
    fewest = 2 * window + 1
    for i in range(a.size):
        if i >= fewest:
            break
        for place in range(np.searchsorted(ordered, a[i]), ordered.size):
            j = order[place]
            if ordered[place] != a[i] or i + j >= fewest:
                break
            tokens = common(one[i:], other[j:])
            if tokens >= least or (tokens >= GRAM and tokens == min(one.size - i, other.size - j)):
                best, fewest = (i, j, tokens), i + j
                break
    return best


@numba.njit(cache=True)
def common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Equal tokens at the beginning."""
    size = min(one.size, other.size)
    for i in range(size):
        if one[i] != other[i]:
            return i
    return size


@numba.njit(cache=True)
def _hashes(ids: NDArray[np.int64], window: int) -> NDArray[np.uint64]:
    """Of the `GRAM` tokens from each of the first places on."""
    count = max(0, min(ids.size - GRAM, window) + 1)
    hashes = np.empty(count, dtype=np.uint64)
    for i in range(count):
        value = np.uint64(0)
        for k in range(GRAM):
            value = value * np.uint64(0x9E3779B97F4A7C15) + np.uint64(ids[i + k]) + np.uint64(1)
        hashes[i] = value
    return hashes
