"""Karmarkar-Karp: split numbers into parts of nearly equal sums by joining opposite ends of partial splits.

The largest differencing method for several parts (Karmarkar and Karp 1982). Each number starts as a split of its own,
with all parts but one empty. The two splits with the largest spread are joined, largest part to smallest, until one is
left.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np
from numpy.typing import NDArray


def differencing(values: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Part of each value, from 0 to `parts` - 1. Memory and time grow with values x parts.

    Example:
        >>> differencing(np.array([8, 7, 6, 5, 4]), 2).tolist()
        [1, 0, 1, 0, 0]
    """
    if values.size == 0 or parts == 1:
        return np.zeros(values.size, dtype=np.int64)
    return _difference(values, parts)


@numba.njit(cache=True)
def _difference(values, parts):
    count = values.size
    sums = np.zeros((count, parts), dtype=np.int64)  # of each split, descending
    sums[:, 0] = values
    names = np.arange(count * parts).reshape(count, parts)  # of the parts; the first of split i holds value i
    joined = np.full(count * parts, -1, dtype=np.int64)  # name of the part that took this one in
    queue = [(-values[i], i) for i in range(count)]
    heapq.heapify(queue)
    while len(queue) > 1:
        _, one = heapq.heappop(queue)
        _, other = heapq.heappop(queue)
        total = sums[one] + sums[other][::-1]
        for i in range(parts):
            joined[names[other, parts - 1 - i]] = names[one, i]
        order = np.argsort(-total, kind="mergesort")
        sums[one] = total[order]
        names[one] = names[one][order]
        heapq.heappush(queue, (sums[one, parts - 1] - sums[one, 0], one))
    last = queue[0][1]
    place = np.empty(count * parts, dtype=np.int64)
    for i in range(parts):
        place[names[last, i]] = i
    part_of = np.empty(count, dtype=np.int64)
    for i in range(count):
        name = i * parts
        while joined[name] >= 0:
            name = joined[name]
        part_of[i] = place[name]
    return part_of
