"""The chunk table as tensors, in the form that a chunk-parallel executor indexes with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from harts.layout.chunks import ChunkTable, chunk_table
from harts.layout.rounds import RunPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkIndex:
    """Chunks sorted by level; a level's chunks need only states of the level before."""

    token_GC: Tensor
    """[G, C] int64. Token of each slot; the number of tokens where a run's last chunk is padded (a zero row)."""
    slot_T: Tensor
    """[T] int64. Place among the G * C slots from which each token's output is taken."""
    parent_G: Tensor
    """[G] int64. Chunk whose end state each chunk starts from, counted from the start of the level before; 0 in the
    first level."""
    level_ranges: tuple[tuple[int, int], ...]
    """First chunk and one past the last of every level. Python integers: no layer waits for a device to read them."""

    @property
    def num_roots(self) -> int:
        """Chunks that start from given states (zero along a tree)."""
        return self.level_ranges[0][1]

    def to(self, device: torch.device) -> ChunkIndex:
        """The same index with its tensors on another device."""
        return replace(
            self,
            token_GC=self.token_GC.to(device, non_blocking=True),
            slot_T=self.slot_T.to(device, non_blocking=True),
            parent_G=self.parent_G.to(device, non_blocking=True),
        )


def chunk_index(runs: RunPlan) -> ChunkIndex:
    """Index the chunks of a run plan."""
    table: ChunkTable = chunk_table(runs)
    begins, ends = table.level_offsets[:-1], table.level_offsets[1:]
    before_G = np.repeat(np.concatenate([[0], begins[:-1]]), ends - begins)
    return ChunkIndex(
        token_GC=torch.from_numpy(np.where(table.token_GC < 0, table.slot_T.size, table.token_GC)),
        slot_T=torch.from_numpy(table.slot_T),
        parent_G=torch.from_numpy(np.where(table.parent_G < 0, 0, table.parent_G - before_G)),
        level_ranges=tuple(zip(begins.tolist(), ends.tolist(), strict=True)),
    )
