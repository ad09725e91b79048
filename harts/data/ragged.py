"""Index arithmetic on pieces of different lengths laid one after the other."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)


def ranges(begin: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """`count[0]` consecutive numbers from `begin[0]` on, then the same for every further entry.

    Example:
        >>> ranges(np.array([5, 1]), np.array([2, 3])).tolist()
        [5, 6, 1, 2, 3]
    """
    before = np.cumsum(count) - count
    return np.arange(count.sum()) + np.repeat(begin - before, count)


def split(values: NDArray[Number], count: NDArray[np.int64]) -> list[NDArray[Number]]:
    """Views of the pieces that lie one after the other, `count[i]` entries long.

    Example:
        >>> [piece.tolist() for piece in split(np.array([4, 5, 6]), np.array([2, 0, 1]))]
        [[4, 5], [], [6]]
    """
    ends = np.cumsum(count).tolist()
    return [values[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=False)]
