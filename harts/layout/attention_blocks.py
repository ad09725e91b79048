"""Which blocks of queries and keys a block-sparse attention kernel computes.

A block of the mask `k <= q < subtree_end_T[k]` (with a window also `position_T[q] - position_T[k] < window`) is
skipped, computed without a mask, or computed with one. Lists are exact: a block is full if and only if all of its
pairs are visible, and not listed if and only if none is. They are built from the tree in time linear in the tokens
and the blocks listed, never from a mask of T x T, once a microbatch.

A query sees as many runs of consecutive keys as its path leaves first children, plus one; every run ends in a partial
block. With the largest subtree first among siblings that is at most 1 + log2(T) runs, whatever the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUPS = 8
"""Groups of rows by length."""
INDEX_PADDING = 256
"""Entries behind the last token in what kernels index. Kernels also load for what fills up the last tile, which they
drop afterwards; no tile is larger than this."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockLists:
    """The blocks to compute, row by row.

    Example (`abcde`, `abxy`, `abcz`, `abc`: tokens a b c d e z x y, blocks of 2 x 2 by query): row 2 is `e z`, which
    lists key blocks 0 `a b` as full and 1 `c d`, 2 `e z` as partial.
    """

    block_size: tuple[int, int]
    """Queries and keys of a block; the last ones may be smaller."""
    by_key: bool
    """Whether rows are blocks of keys and entries blocks of queries (for a backward pass), or the other way round."""
    partial_count: Tensor
    """[rows] int32. Blocks of the row with visible and invisible pairs."""
    partial_index: Tensor
    """[rows, most partial blocks of a row, at least 1] int32. The first `partial_count` are the blocks, ascending."""
    full_count: Tensor
    """[rows] int32. Blocks of the row with visible pairs only."""
    full_index: Tensor
    """[rows, most full blocks of a row, at least 1] int32."""
    order: Tensor
    """[rows] int32. Every row once, longest first in groups, as rows come inside a group: one group lists at least half
    as many blocks as its longest row, so that rows of equal length stay neighbours, which read the same keys."""
    group_ends: Tensor
    """[GROUPS] int32. Where each group ends in `order`; the last one takes what is left, and may be empty."""

    def to(self, device: torch.device) -> BlockLists:
        """The same lists on another device."""
        names = ("partial_count", "partial_index", "full_count", "full_index", "order", "group_ends")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionBlocks:
    """All that block-sparse tree attention reads of a layout, for one window and one kernel's block sizes."""

    forward: BlockLists
    """By query."""
    backward: BlockLists
    """By key."""
    subtree_end_T: Tensor
    """[T + INDEX_PADDING] int32. One past the last descendant of each token; zeros behind the last token."""
    position_T: Tensor
    """[T + INDEX_PADDING] int32. Depth of each token; zeros behind the last token."""
    window_end_T: Tensor | None
    """[T + INDEX_PADDING] int32. One past the last position from which each token is seen, zeros behind the last
    token: `q` sees `k` iff `k <= q < subtree_end_T[k]` and `position_T[q] < window_end_T[k]`. None without a window."""
    window: int | None
    """Positions of the path that a query sees, its own included; None for all."""
    num_tokens: int
    """T."""

    def to(self, device: torch.device) -> AttentionBlocks:
        """The same on another device."""
        return replace(
            self,
            forward=self.forward.to(device),
            backward=self.backward.to(device),
            subtree_end_T=self.subtree_end_T.to(device, non_blocking=True),
            position_T=self.position_T.to(device, non_blocking=True),
            window_end_T=None if self.window_end_T is None else self.window_end_T.to(device, non_blocking=True),
        )


def attention_blocks(
    subtree_end_T: NDArray[np.int64],
    position_T: NDArray[np.int64],
    *,
    forward_size: tuple[int, int],
    backward_size: tuple[int, int],
    window: int | None = None,
) -> AttentionBlocks:
    """List the blocks of both passes.

    Args:
        subtree_end_T: [T] int64, one past the last descendant of each token, in pre-order.
        position_T: [T] int64, depth of each token.
        forward_size: Queries and keys of a block in the forward lists, >= 1.
        backward_size: The same in the backward lists.
        window: Positions of the path that a query sees, its own included, >= 1; None for all.

    Example (a token with two children):
        >>> end, position = np.array([3, 2, 3]), np.array([0, 1, 1])
        >>> blocks = attention_blocks(end, position, forward_size=(1, 1), backward_size=(2, 2))
        >>> blocks.forward.full_count.tolist(), blocks.backward.partial_count.tolist()
        ([1, 2, 2], [2, 0])
    """
    end = np.ascontiguousarray(subtree_end_T, dtype=np.int64)
    position = np.ascontiguousarray(position_T, dtype=np.int64)
    return AttentionBlocks(
        forward=block_lists(end, position, block_size=forward_size, window=window),
        backward=block_lists(end, position, block_size=backward_size, window=window, by_key=True),
        subtree_end_T=_padded(end),
        position_T=_padded(position),
        window_end_T=None if window is None else _padded(position + window),
        window=window,
        num_tokens=end.size,
    )


def block_lists(
    subtree_end_T: NDArray[np.int64],
    position_T: NDArray[np.int64],
    *,
    block_size: tuple[int, int],
    window: int | None = None,
    by_key: bool = False,
) -> BlockLists:
    """List the blocks with visible pairs, by query or by key; arguments as in `attention_blocks`."""
    # Compiled on first use: importing harts does not import numba.
    from harts.layout.attention_walk import list_blocks

    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a query sees at least its own position. Pass None for no window.")
    rows = -(-subtree_end_T.size // block_size[1 if by_key else 0])
    sizes = (*block_size, 0 if window is None else window)
    count, none = np.zeros((2, rows), dtype=np.int32), np.empty((rows, 0), dtype=np.int32)
    list_blocks(subtree_end_T, position_T, sizes, by_key, count, none, none)
    # Kernels want a last dimension of at least 1.
    partial, full = (np.zeros((rows, max(1, int(widest))), dtype=np.int32) for widest in count.max(axis=1))
    count[:] = 0
    list_blocks(subtree_end_T, position_T, sizes, by_key, count, partial, full)
    order, group_ends = longest_first(count.sum(axis=0))
    return BlockLists(
        block_size=block_size,
        by_key=by_key,
        partial_count=torch.from_numpy(count[0].copy()),
        partial_index=torch.from_numpy(partial),
        full_count=torch.from_numpy(count[1].copy()),
        full_index=torch.from_numpy(full),
        order=torch.from_numpy(order),
        group_ends=torch.from_numpy(group_ends),
    )


def longest_first(length: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`order` and `group_ends` of `BlockLists` for rows of these lengths.

    Example:
        >>> order, group_ends = longest_first(np.array([1, 9, 5, 10], dtype=np.int32))
        >>> order.tolist(), group_ends.tolist()
        ([1, 2, 3, 0], [3, 4, 4, 4, 4, 4, 4, 4])
    """
    order = np.argsort(-length, kind="stable")
    sorted_length, ends, begin = length[order], [], 0
    for _ in range(GROUPS - 1):
        end = begin + int(np.count_nonzero(2 * sorted_length[begin:] >= sorted_length[begin : begin + 1]))
        order[begin:end].sort()
        ends.append(end)
        begin = end
    order[begin:].sort()
    return order.astype(np.int32), np.array([*ends, length.size], dtype=np.int32)


def _padded(values_T: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.pad(values_T, (0, INDEX_PADDING)).astype(np.int32))
