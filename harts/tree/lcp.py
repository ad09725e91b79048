"""Lexicographic order of the trajectories of a batch, and the longest common prefix of neighbours.

Every later fact about sharing follows from these two. Two tokens are the same where both their id and their
share key are equal; loss masks, advantages and weights play no part.
"""

from __future__ import annotations

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
    return sort_tokens(batch.token_ids_F, batch.offsets, share_key_F=batch.share_key_F)


def sort_tokens(
    token_ids_F: NDArray[np.integer], offsets: NDArray[np.int64], *, share_key_F: NDArray[np.integer] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort slices of a flat array of token ids and compare each with the one before.

    Args:
        token_ids_F: [F] int32 or int64; 32 bits take half the time where memory is the limit.
        offsets: [N + 1] int64. Trajectory `i` is `token_ids_F[offsets[i]:offsets[i + 1]]`; may be empty.
        share_key_F: [F] int64. Tokens with different keys differ; None where no token has a key.

    Returns:
        As `sort_with_lcp`.

    Example:
        >>> order_N, lcp_N = sort_tokens(np.array([1, 2, 3, 1, 2]), np.array([0, 3, 5]))
        >>> order_N.tolist(), lcp_N.tolist()
        ([1, 0], [0, 2])
    """
    from harts.tree.merge_sort import merge_sort

    # A key that never changes tells nothing apart, and reading it would double the time.
    if share_key_F is None or (share_key_F == share_key_F[:1]).all():
        return merge_sort(token_ids_F, token_ids_F[:0], offsets)
    return merge_sort(token_ids_F.astype(np.int64, copy=False), share_key_F, offsets)
