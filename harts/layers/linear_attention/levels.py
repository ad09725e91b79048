"""States along a tree's chunks: chunk `n` of every path in one step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layout.chunk_index import ChunkIndex, chunk_index
from harts.layout.rounds import RunPlan


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


def sequence_chunks(cu_seqlens: Tensor, chunk_size: int) -> ChunkIndex:
    """The chunks of independent sequences, for a kernel's public signature; those of level 0 are in their order.

    Args:
        cu_seqlens: [sequences + 1] int64 on the CPU; sequence `i` is rows `cu_seqlens[i]:cu_seqlens[i + 1]`, at
            least one.
        chunk_size: C; chunks are counted from the start of each sequence.
    """
    rows = np.arange(int(cu_seqlens[-1]))
    none = np.full(cu_seqlens.numel() - 1, -1)
    runs = RunPlan(  # runs that follow nothing
        chunk_size=chunk_size,
        token_R=rows,
        owner_T=rows,
        run_offsets=cu_seqlens.numpy(),
        run_parent=none,
        run_round=np.zeros_like(none),
    )
    return chunk_index(runs)


def final_states(states_G: Tensor, chunks: ChunkIndex, cu_seqlens: Tensor) -> Tensor:
    """[sequences, ...] the state after the last chunk of each sequence."""
    last_slot = chunks.slot_T[cu_seqlens[1:].to(chunks.slot_T.device) - 1]
    return states_G[last_slot // chunks.token_GC.shape[1]]
