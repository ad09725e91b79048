"""Plans without sharing: right-padded batches of trajectories of similar lengths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from harts.data.ragged import padded_length


def padded_bins(
    length_N: NDArray[np.int64], work_N: NDArray[np.float64], *, limit: int, ranks: int
) -> NDArray[np.int64]:
    """Cut the trajectories, longest first, into batches.

    Args:
        length_N: [N] int64.
        work_N: [N] float64. Work of each trajectory alone.
        limit: Most tokens of a batch, padded as `padded_length` says. A single trajectory is always one.
        ranks: The number of batches is a multiple of it unless there are too few trajectories.

    Returns:
        [N] int64, the batch of each trajectory. On one rank as few batches as the limit allows; on more,
        as few as they can share evenly, with the least possible maximum of work for this order.
    """
    order_N = np.argsort(-length_N, kind="stable")
    bounds = list(_cut(length_N[order_N], work_N[order_N], limit, np.inf))
    most = -(-len(bounds) // ranks) * ranks
    if ranks > 1:
        low, high = 0.0, float(work_N.sum())
        for _ in range(30):
            capacity = (low + high) / 2
            tried = list(_cut(length_N[order_N], work_N[order_N], limit, capacity))
            low, high, bounds = (low, capacity, tried) if len(tried) <= most else (capacity, high, bounds)
    while len(bounds) < min(most, length_N.size):
        # The widest batch has the most trajectories to give.
        begins = [0, *bounds[:-1]]
        widest = max(range(len(bounds)), key=lambda i: bounds[i] - begins[i])
        bounds.insert(widest, (begins[widest] + bounds[widest]) // 2)
    bin_N = np.empty_like(length_N)
    bin_N[order_N] = np.searchsorted(bounds, np.arange(length_N.size), side="right")
    return bin_N


def _cut(length_N: NDArray[np.int64], work_N: NDArray[np.float64], limit: int, capacity: float) -> Iterator[int]:
    """Ends of the batches: as many trajectories at a time as fit when padded to the first."""
    total_N = np.cumsum(work_N)
    begin = 0
    while begin < length_N.size:
        done = total_N[begin - 1] if begin else 0.0
        by_work = int(np.searchsorted(total_N, done + capacity, side="right"))
        most = limit // padded_length(int(length_N[begin]))
        end = max(begin + 1, min(begin + most, by_work, length_N.size))
        yield end
        begin = end
