"""Counts of lengths in bins of constant relative width: a fixed size, whatever is counted."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BITS = 9


class Histogram:
    """How often each length occurs: exact below 1024, within 0.2% above.

    Bins hold the values with the same ten leading binary digits.

    Example:
        >>> lengths = Histogram()
        >>> lengths.add(np.array([1, 2, 2, 5000]))
        >>> lengths.quantiles((0.5, 1.0)), lengths.total
        ([2, 5000], 4)
    """

    def __init__(self) -> None:
        """Nothing counted yet."""
        self._counts = np.zeros((64 - BITS) << BITS, dtype=np.int64)

    @property
    def total(self) -> int:
        """Values counted."""
        return int(self._counts.sum())

    def add(self, values: NDArray[np.int64]) -> None:
        """Count values, each >= 0."""
        from harts.inspect.counting import add_to_histogram

        add_to_histogram(self._counts, values, BITS)

    def quantiles(self, shares: tuple[float, ...]) -> list[int]:
        """The smallest value that at least these shares of all do not exceed (its bin's smallest); zeros if empty."""
        reached = np.cumsum(self._counts)
        ranks = [max(1, math.ceil(share * reached[-1])) for share in shares]
        return [_smallest(int(np.searchsorted(reached, rank))) if reached[-1] else 0 for rank in ranks]

    def octaves(self) -> list[tuple[int, int]]:
        """(smallest value, count) for 0, 1, 2-3, 4-7, ..., from the first to the last that is not empty."""
        bins = np.flatnonzero(self._counts)
        if bins.size == 0:
            return []
        octave = [_smallest(int(b)).bit_length() for b in bins]
        counts = np.bincount(octave, weights=self._counts[bins]).astype(int).tolist()
        return [(1 << i >> 1, counts[i]) for i in range(octave[0], octave[-1] + 1)]


def _smallest(number: int) -> int:
    """Of a bin. Bin `(shift << BITS) + digits` holds `digits << shift`, where digits has BITS + 1 bits if shift > 0."""
    shift = max(0, (number >> BITS) - 1)
    return (number - (shift << BITS)) << shift
