"""Sums along trajectories and back: which rows of a microbatch make up which trajectory.

Rows belong to segments, segments have parents, and a trajectory ends in a segment. A sum along every trajectory then
needs the sums of segments only, carried from parents to children by doubling jumps: as many steps as the depth has
binary digits, also for chains of 10^5 segments. Rows of a flat batch are segments without parents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPaths:
    """The trajectories of a microbatch as paths over its rows.

    Example (`abcde`, `abxy`, `abcz`, `abc`; segments ab, c, de, z, xy): `segment_T` [0 0 1 2 2 3 4 4],
    `tail_N` [1 2 3 4], `length_N` [3 5 4 4].
    """

    segment_T: Tensor
    """[T] int64. Segment of every row; S for padding."""
    jumps: tuple[Tensor, ...]
    """[S + 1] int64 each. The 1st, 2nd, 4th, ... segment above each, S for none, as many as the depth needs."""
    tail_N: Tensor
    """[N] int64. Segment in which each trajectory ends."""
    length_N: NDArray[np.int64]
    """[N] int64. Tokens of each trajectory."""
    weight_N: NDArray[np.float64]
    """[N] float64. The trajectories' weights."""

    def sum_along(self, values_TX: Tensor) -> Tensor:
        """Add up rows along every trajectory; padding counts for nothing.

        Args:
            values_TX: [T, X] floating point.

        Returns:
            [N, X].
        """
        sums_SX = values_TX.new_zeros(self._num_segments + 1, values_TX.shape[1])
        sums_SX.index_add_(0, self.segment_T, values_TX)
        sums_SX[-1] = 0
        for jump_S in self.jumps:
            sums_SX = sums_SX + sums_SX[jump_S]
        return sums_SX[self.tail_N]

    def spread(self, values_NX: Tensor) -> Tensor:
        """Give every row the sum over the trajectories that contain it: the transpose of `sum_along`.

        Args:
            values_NX: [N, X] floating point. Ones give multiplicities.

        Returns:
            [T, X], zero at padding.
        """
        sums_SX = values_NX.new_zeros(self._num_segments + 1, values_NX.shape[1])
        sums_SX.index_add_(0, self.tail_N, values_NX)
        for jump_S in self.jumps:
            sums_SX = sums_SX.index_add(0, jump_S, sums_SX)
            sums_SX[-1] = 0
        return sums_SX[self.segment_T]

    @property
    def _num_segments(self) -> int:
        return self.jumps[0].numel() - 1

    def to(self, device: torch.device) -> TokenPaths:
        """The same paths on another device."""
        return TokenPaths(
            segment_T=self.segment_T.to(device, non_blocking=True),
            jumps=tuple(jump.to(device, non_blocking=True) for jump in self.jumps),
            tail_N=self.tail_N.to(device, non_blocking=True),
            length_N=self.length_N,
            weight_N=self.weight_N,
        )


def doubling_jumps(parent_S: NDArray[np.int64]) -> tuple[Tensor, ...]:
    """The segments 1, 2, 4, ... above each, until all of them are none.

    Args:
        parent_S: [S] int64. Segment above; -1 for a root.
    """
    jump_S = np.append(np.where(parent_S < 0, parent_S.size, parent_S), parent_S.size)
    jumps = [jump_S]
    while (jumps[-1] < parent_S.size).any():
        jumps.append(jumps[-1][jumps[-1]])
    return tuple(torch.from_numpy(jump) for jump in jumps)
