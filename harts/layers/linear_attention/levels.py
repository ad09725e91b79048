"""States along a tree's chunks: chunk `n` of every path in one step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layout.chunk_index import ChunkIndex


def states_along_levels(
    chunks: ChunkIndex, initial_state: Tensor, advance: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Hand states from chunk to chunk, the only sequential part of chunked linear attention.

    Args:
        chunks: Sorted by level.
        initial_state: [chunks of level 0, ...].
        advance: From a level's chunks, as a slice of the G chunks, and the states before them to those after them.

    Returns:
        The states before and after each chunk, both [G, ...].
    """
    before, after = [], []
    for level, (begin, end) in enumerate(chunks.level_ranges):
        state = initial_state if level == 0 else after[-1].index_select(0, chunks.parent_G[begin:end])
        before.append(state)
        after.append(advance(slice(begin, end), state))
    return torch.cat(before), torch.cat(after)


def chunk_rows(x: Tensor, chunks: ChunkIndex) -> Tensor:
    """[rows, H, ...] to [G, H, C, ...]; padding rows are zero."""
    return gather_rows(x, chunks.token_GC).transpose(1, 2)


def owned_rows(x: Tensor, chunks: ChunkIndex) -> Tensor:
    """[G, H, C, ...] to [T, H, ...]: each token's output from the one chunk that owns it."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, chunks.slot_T)
