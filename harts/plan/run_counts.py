"""Runs, rounds and replayed rows of linear attention, counted from segments, compiled.

The numbers of `harts.layout.rounds` without laying anything out: one pass down the segments and one up, a few
bytes a segment, so that trees of millions of segments can be counted. Kept out of `size.py` so that importing
`harts` does not import numba.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray


@numba.njit(cache=True)
def count_runs(
    parent_S: NDArray[np.int64], start_S: NDArray[np.int64], end_S: NDArray[np.int64], chunk_size: int
) -> tuple[int, int, int]:
    """What `plan_runs` would give.

    A path that parts from another goes back to the last full chunk (the boundary) before the branch; all but one of
    the paths below a branch open a run there, and so does the boundary itself.

    Args:
        parent_S: [S] int64, as in `PrefixTree`.
        start_S: [S] int64, as in `PrefixTree`.
        end_S: [S] int64, as in `PrefixTree`.
        chunk_size: C >= 1.

    Returns:
        Runs, rounds (model F) and replayed rows.
    """
    count = parent_S.size
    children = np.zeros(count, dtype=np.int32)
    holder = np.empty(count, dtype=np.int32)  # segment with the token before the last boundary
    is_cut = np.zeros(count, dtype=np.bool_)
    runs = 0
    for s in range(count):
        parent = parent_S[s]
        if parent < 0:
            runs += 1
        else:
            children[parent] += 1
        if end_S[s] // chunk_size * chunk_size > start_S[s]:
            holder[s] = s
        else:
            holder[s] = holder[parent] if parent >= 0 else -1
    replayed = 0
    for s in range(count):
        if children[s] > 1:
            runs += children[s] - 1
            replayed += (children[s] - 1) * (end_S[s] % chunk_size)
            if holder[s] >= 0:
                is_cut[holder[s]] = True
    cuts = np.zeros(count, dtype=np.int32)  # on the path
    most = 0
    for s in range(count):
        above = cuts[parent_S[s]] if parent_S[s] >= 0 else 0
        cuts[s] = above + is_cut[s]
        runs += is_cut[s]
        most = max(most, cuts[s])
    return runs, 1 + most, replayed


@numba.njit(cache=True)
def count_rounds_e(
    parent_S: NDArray[np.int64], start_S: NDArray[np.int64], end_S: NDArray[np.int64], chunk_size: int
) -> int:
    """What `rounds_if_interior_states` gives; arguments as for `count_runs`."""
    count = parent_S.size
    # The two largest numbers among the boundaries and path ends next below each segment; last, below the roots.
    first, second = np.zeros(count + 1, dtype=np.int32), np.zeros(count + 1, dtype=np.int32)
    for s in range(count - 1, -1, -1):
        high, low = max(first[s], 1), second[s]
        above = parent_S[s] if parent_S[s] >= 0 else count
        if end_S[s] // chunk_size * chunk_size > start_S[s]:
            high, low = max(high, low + 1), 0
        for number in (high, low):
            if number > first[above]:
                first[above], second[above] = number, first[above]
            elif number > second[above]:
                second[above] = number
    return first[count]
