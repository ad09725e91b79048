"""Order, common prefixes and segments by definition: readable, in Python and NumPy, for small lists."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def sort_with_lcp(words: list[tuple]) -> tuple[list[int], list[int]]:
    """Order of the words by Python's sort, and what neighbours share by counting."""
    order = sorted(range(len(words)), key=words.__getitem__)
    return order, [0, *(common_prefix(words[a], words[b]) for a, b in pairwise(order))]


def common_prefix(a: tuple, b: tuple) -> int:
    return next((d for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def segments(length_N: NDArray[np.int64], lcp_N: NDArray[np.int64]) -> dict[str, list[int]]:
    """The segment arrays of `PrefixTree`, from sorting the names of segments."""
    piece_N = np.array(pieces_that_fork(length_N.tolist(), lcp_N.tolist()), dtype=np.int64)
    # A trajectory's new tokens are one piece of the packed order. A segment is named by its piece and its end, and
    # these names in ascending order are the pre-order.
    stride = int(length_N.max()) + 1
    fork_N = piece_N * stride + lcp_N
    leaf_N = np.arange(length_N.size) * stride + length_N
    new_N = length_N > lcp_N
    name_S = np.unique(np.concatenate([fork_N[lcp_N > 0], leaf_N[new_N]]))
    piece_S, end_S = np.divmod(name_S, stride)
    first_S = np.diff(piece_S, prepend=-1) > 0
    above_S = np.searchsorted(name_S, fork_N[piece_S])
    parent_S = np.where(first_S, np.where(lcp_N[piece_S] > 0, above_S, -1), np.arange(name_S.size) - 1)
    tail_N = np.searchsorted(name_S, np.where(new_N, leaf_N, fork_N))
    count_S = np.bincount(tail_N, minlength=name_S.size)
    for segment in range(count_S.size - 1, -1, -1):
        if parent_S[segment] >= 0:
            count_S[parent_S[segment]] += count_S[segment]
    return {
        "parent_S": parent_S.tolist(),
        "start_S": np.where(first_S, lcp_N[piece_S], np.roll(end_S, 1)).tolist(),
        "end_S": end_S.tolist(),
        "multiplicity_S": count_S.tolist(),
        "tail_N": tail_N.tolist(),
    }


def pieces_that_fork(lengths: list[int], lcps: list[int]) -> list[int]:
    """For each trajectory, the one whose new tokens hold the last token shared with the one before; -1 if none."""
    pieces: list[int] = []
    path: list[int] = []  # trajectories whose new tokens make up the path to the current one, from the root on
    for i, (length, lcp) in enumerate(zip(lengths, lcps, strict=True)):
        while path and lcps[path[-1]] >= lcp:
            path.pop()
        pieces.append(path[-1] if path else -1)
        if length > lcp:
            path.append(i)
    return pieces
