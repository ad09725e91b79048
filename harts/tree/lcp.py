"""Lexicographic order of the trajectories of a batch, and the longest common prefix of neighbours.

Every later fact about sharing follows from these two. Two tokens are the same where both their id and their
share key are equal; loss masks, advantages and weights play no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harts.data import TrajectoryBatch


def sort_with_lcp(batch: TrajectoryBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort trajectories by their (token id, share key) pairs and compare each with the one before.

    Args:
        batch: Any checked batch.

    Returns:
        `order_N`, [N] int64: trajectory numbers in lexicographic order, a prefix before what it begins, equal
        trajectories in batch order. `lcp_N`, [N] int64: tokens shared with the trajectory before; 0 for the first.
    """
    symbols = _split(_symbols(batch), batch.offsets)
    # Big-endian bytes of unsigned integers compare like the integers, so one comparison in C orders two trajectories.
    keys = [symbols_L.tobytes() for symbols_L in symbols]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    lcps = [0] + [_common_prefix(symbols[a], symbols[b]) for a, b in pairwise(order)]
    return np.array(order, dtype=np.int64), np.array(lcps, dtype=np.int64)


def _symbols(batch: TrajectoryBatch) -> NDArray[np.unsignedinteger]:
    """[F] big-endian unsigned integers, equal and ordered exactly as the (token id, share key) pairs are."""
    symbols_F = batch.token_ids_F
    if batch.share_key_F is not None:
        # Dense ranks instead of a hash: two different pairs must never look alike.
        tokens, token_rank_F = np.unique(batch.token_ids_F, return_inverse=True)
        keys, key_rank_F = np.unique(batch.share_key_F, return_inverse=True)
        assert tokens.size * keys.size < 2**63
        symbols_F = token_rank_F.astype(np.int64) * keys.size + key_rank_F
    return symbols_F.astype(">u4" if symbols_F.max() < 2**32 else ">u8")


def _split(values_F: NDArray[np.unsignedinteger], offsets: NDArray[np.int64]) -> Sequence[NDArray[np.unsignedinteger]]:
    bounds = offsets.tolist()
    return [values_F[begin:end] for begin, end in pairwise(bounds)]


def _common_prefix(a_L: NDArray[np.unsignedinteger], b_L: NDArray[np.unsignedinteger]) -> int:
    shorter = min(a_L.size, b_L.size)
    differs = a_L[:shorter] != b_L[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter
