"""Trajectory-wise execution: each trajectory is a row of its own, shared tokens are computed again.

Rows are padded on the right. Causal layers never look right, so padding cannot reach a trajectory's tokens, and chunks
start at position 0 of every row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.data.ragged import padded_length, ranges
from harts.layout.edges import LossEdges, loss_edges
from harts.layout.paths import TokenPaths, doubling_jumps

PADDING_ID = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatLayout:
    """A padded batch of whole trajectories. Its hidden rows are those of `[N * L, D]`.

    L is the `padded_length` of the longest.
    """

    token_ids_NL: Tensor
    """[N, L] int64, padded with `PADDING_ID`."""
    edges: LossEdges
    """One edge a trained token."""
    num_tokens: int
    """Tokens of all trajectories, padding not counted."""
    routes_TMA: Tensor | None
    """[N * L, M, A] int32. Recorded experts, -1 where none were; None without recorded routes."""
    paths: TokenPaths
    """Every trajectory a segment of its own, over the rows of `[N * L, D]`."""

    def token_rows(self) -> NDArray[np.int64]:
        """[F] int64. Row of every token, trajectory after trajectory; the other rows are padding."""
        return np.flatnonzero((self.paths.segment_T < self.paths.tail_N.numel()).cpu().numpy())

    def to(self, device: torch.device) -> FlatLayout:
        """The same layout on another device."""
        return FlatLayout(
            token_ids_NL=self.token_ids_NL.to(device),
            edges=self.edges.to(device),
            num_tokens=self.num_tokens,
            routes_TMA=None if self.routes_TMA is None else self.routes_TMA.to(device),
            paths=self.paths.to(device),
        )


def flat_layout(batch: TrajectoryBatch, trajectories: NDArray[np.int64]) -> FlatLayout:
    """Lay out some trajectories of a batch one a row, in the order given."""
    length_N = batch.length_N[trajectories]
    token_ids_NL = np.full((trajectories.size, padded_length(int(length_N.max()))), PADDING_ID, dtype=np.int64)
    for row, (trajectory, length) in enumerate(zip(trajectories, length_N, strict=True)):
        begin = batch.offsets[trajectory]
        token_ids_NL[row, :length] = batch.token_ids_F[begin : begin + length]
    rows = np.arange(trajectories.size)
    is_token_NL = np.arange(token_ids_NL.shape[1]) < length_N[:, None]
    policy = batch.policy_tokens(trajectories)
    trajectory_P = batch.trajectory_P[policy]
    row_of = np.zeros(batch.num_trajectories, dtype=np.int64)
    row_of[trajectories] = rows
    slot_P = row_of[trajectory_P] * token_ids_NL.shape[1] + batch.trained_P[policy] - batch.offsets[trajectory_P]
    return FlatLayout(
        token_ids_NL=torch.from_numpy(token_ids_NL),
        edges=loss_edges(
            slot_P, batch.temperature_N[trajectory_P], np.arange(token_ids_NL.size) - 1, token_ids_NL.reshape(-1)
        ),
        num_tokens=int(length_N.sum()),
        routes_TMA=_routes(batch, trajectories, is_token_NL.reshape(-1)),
        paths=TokenPaths(
            segment_T=torch.from_numpy(np.where(is_token_NL, rows[:, None], rows.size).reshape(-1)),
            jumps=doubling_jumps(np.full(rows.size, -1)),
            tail_N=torch.from_numpy(rows),
            length_N=length_N,
            weight_N=batch.weight_N[trajectories],
        ),
    )


def _routes(batch: TrajectoryBatch, trajectories: NDArray[np.int64], is_token_T: NDArray[np.bool_]) -> Tensor | None:
    if batch.routes_FMA is None:
        return None
    routes_TMA = np.full((is_token_T.size, *batch.routes_FMA.shape[1:]), -1, dtype=np.int32)
    routes_TMA[is_token_T] = batch.routes_FMA[ranges(batch.offsets[trajectories], batch.length_N[trajectories])]
    return torch.from_numpy(routes_TMA)
