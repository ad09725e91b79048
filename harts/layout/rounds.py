"""Runs and rounds of chunked linear attention on a tree (model F: kernels that return final states only).

A run is a piece of one root-to-leaf path that starts at a multiple of the chunk size with a known state. A round is
a set of runs whose initial states are all known: one packed call of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPlan:
    """Which tokens run after which state, in run order.

    Runs are sorted by round; rows of a run are consecutive on one path. `R` counts rows, replays included.
    """

    chunk_size: int
    """C, tokens of a chunk."""
    token_R: NDArray[np.int64]
    """[R] int64. Packed token of each row."""
    owner_T: NDArray[np.int64]
    """[T] int64. The one row from which a token's output is taken."""
    run_offsets: NDArray[np.int64]
    """[runs + 1] int64. Rows of run `r` are `run_offsets[r]:run_offsets[r + 1]` (a kernel's cu_seqlens)."""
    run_parent: NDArray[np.int64]
    """[runs] int64. Run whose final state is this run's initial state; -1 for the zero state."""
    run_round: NDArray[np.int64]
    """[runs] int64, ascending from 0. Larger than the parent's."""

    @property
    def num_rounds(self) -> int:
        """Sequential kernel calls."""
        return int(self.run_round[-1]) + 1

    @property
    def num_replayed(self) -> int:
        """Rows whose output is not taken."""
        return self.token_R.size - self.owner_T.size


def plan_runs(tree: PrefixTree, chunk_size: int, *, replay: bool = True) -> RunPlan:
    raise NotImplementedError
