"""Where two token sequences go on alike after a difference, compiled."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

GRAM = 16
"""Tokens that are hashed together."""
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""Odd, without a pattern: 2^64 over the golden ratio."""


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
    # A table of chains: places of `other` by the last bits of their hashes, the first places first.
    mask = 1
    while mask < 2 * b.size:
        mask *= 2
    heads, following = np.full(mask, -1, dtype=np.int64), np.full(b.size, -1, dtype=np.int64)
    for j in range(b.size - 1, -1, -1):
        slot = np.int64(b[j] & np.uint64(mask - 1))
        following[j], heads[slot] = heads[slot], j
    best = (0, 0, 0)
    fewest = 2 * window + 1
    for i in range(a.size):
        if i >= fewest:
            break
        j = heads[np.int64(a[i] & np.uint64(mask - 1))]
        while j >= 0 and i + j < fewest:
            if a[i] == b[j]:
                tokens = common(one[i:], other[j:])
                if tokens >= least or (tokens >= GRAM and tokens == min(one.size - i, other.size - j)):
                    best, fewest = (i, int(j), tokens), i + j
                    break
            j = following[j]
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
    if count == 0:
        return hashes
    power = np.uint64(1)
    for _ in range(GRAM):
        power *= MULTIPLIER
    value = np.uint64(0)
    for k in range(GRAM - 1):
        value = value * MULTIPLIER + np.uint64(ids[k] + 1)
    for i in range(count):
        value = value * MULTIPLIER + np.uint64(ids[i + GRAM - 1] + 1)
        if i > 0:
            value -= power * np.uint64(ids[i - 1] + 1)
        # Mixed, so that the last bits depend on all tokens.
        hashes[i] = (value ^ (value >> np.uint64(32))) * MULTIPLIER >> np.uint64(16)
    return hashes
