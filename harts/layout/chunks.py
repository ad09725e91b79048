"""The chunks of a run plan, level by level, for executors that batch over chunks instead of calling once a round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.layout.rounds import RunPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkTable:
    """All chunks of all runs; `G` counts chunks.

    Chunks of one level depend on none of each other, so their state updates are one batched operation; what happens
    inside chunks needs no order at all.

    Example (abcde, abxy, abcz, abc packed as a b c d e z x y, chunks of 2):
        chunks  ab | cd cz xy | e    token_GC [[0, 1], [2, 3], [2, 5], [6, 7], [4, -1]]
        parent_G [-1, 0, 0, 0, 1]  level_offsets [0, 1, 4, 5]  slot_T [0, 1, 2, 3, 8, 5, 6, 7]
    """

    token_GC: NDArray[np.int64]
    """[G, C] int64. Packed token of each slot; -1 after the end of a run, which must leave the state as it is."""
    parent_G: NDArray[np.int64]
    """[G] int64. Chunk whose end state is this chunk's initial state, always one of the level before; -1 for zero."""
    level_offsets: NDArray[np.int64]
    """[levels + 1] int64. Chunks of level `l` are `level_offsets[l]:level_offsets[l + 1]`; the level is the number of
    chunks before on the path."""
    slot_T: NDArray[np.int64]
    """[T] int64. Place among the G * C slots from which a token's output is taken."""

    @property
    def num_levels(self) -> int:
        """Sequential steps: chunks of the longest path."""
        return self.level_offsets.size - 1


def chunk_table(runs: RunPlan) -> ChunkTable:
    """Cut runs into chunks and sort these by level, in run order within a level.

    Args:
        runs: With or without replay.

    Returns:
        The table.
    """
    C = runs.chunk_size
    size = np.diff(runs.run_offsets)
    chunks = -(-size // C)
    end = np.cumsum(chunks)  # in run order: one past the last chunk of each run
    run_G = np.repeat(np.arange(size.size), chunks)
    nth_G = np.arange(run_G.size) - (end - chunks)[run_G]

    level_G = _first_levels(runs.run_parent, chunks)[run_G] + nth_G
    order_G = np.argsort(level_G, kind="stable")
    place_G = np.argsort(order_G)

    parent_run_G = runs.run_parent[run_G]
    before_G = np.where(nth_G > 0, np.arange(run_G.size) - 1, np.where(parent_run_G >= 0, end[parent_run_G] - 1, -1))
    parent_G = np.where(before_G >= 0, place_G[before_G], -1)[order_G]

    run_R = np.repeat(np.arange(size.size), size)
    nth_R = np.arange(run_R.size) - runs.run_offsets[run_R]
    slot_R = place_G[(end - chunks)[run_R] + nth_R // C] * C + nth_R % C
    token_GC = np.full((run_G.size, C), -1, dtype=np.int64)
    token_GC.flat[slot_R] = runs.token_R
    return ChunkTable(
        token_GC=token_GC,
        parent_G=parent_G,
        level_offsets=np.concatenate([[0], np.cumsum(np.bincount(level_G))]),
        slot_T=slot_R[runs.owner_T],
    )


def _first_levels(run_parent: NDArray[np.int64], chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """[runs] int64. Level of each run's first chunk."""
    levels: list[int] = []
    counts = chunks.tolist()
    for parent in run_parent.tolist():
        levels.append(levels[parent] + counts[parent] if parent >= 0 else 0)
    return np.array(levels, dtype=np.int64)
