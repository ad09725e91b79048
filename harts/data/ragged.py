"""Index arithmetic on pieces of different lengths laid one after the other."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ranges(begin: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """`count[0]` consecutive numbers from `begin[0]` on, then the same for every further entry.

    Example:
        >>> ranges(np.array([5, 1]), np.array([2, 3])).tolist()
        [5, 6, 1, 2, 3]
    """
    before = np.cumsum(count) - count
    return np.arange(count.sum()) + np.repeat(begin - before, count)
