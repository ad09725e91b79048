"""What the GPU kernels of short convolutions and of row gathers index with, built once a microbatch.

Layers work on tokens in pre-order; the kernels of linear attention on the rows of the run order, where a token may
come again as a replay. Backwards, nearly every token has one row and one descendant at each distance, the one that
is packed that many places after it. The tables here name the exceptions, so that kernels do the common case at the
speed of memory and the rest through short lists, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.layout.launch import LaunchPlan
from harts.layout.rounds import RunPlan

LARGEST_INDEX = 2**31 - 1


class TokenFlag(IntFlag):
    """What keeps a token from the common path of the backward pass."""

    BREAK = 1
    """Its parent is not the token packed before it."""
    SHARED = 2
    """It has several rows."""
    NEEDED = 4
    """A branching token needs its gradient."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowIndex:
    """Which token each row of the run order is, and back. `U` counts tokens with more than one row.

    Example (rows a b c d e c z x y of the tokens a b c d e z x y, `cz` replaying c, which `cde` owns):
        owned_token_R [0 1 2 3 4 -1 5 6 7], first_row_T [0 1 2 3 4 6 7 8], shared_slot_T [-1 -1 0 -1 -1 -1 -1 -1],
        shared_token_U [2], shared_offsets [0 2], shared_rows [2 5]
    """

    token_R: Tensor
    """[R] int32. Token of each row."""
    owned_token_R: Tensor
    """[R] int32. The same, but -1 where the row is a replay."""
    owner_T: Tensor
    """[T] int32. Row from which each token's output is taken."""
    first_row_T: Tensor
    """[T] int32. First of each token's rows."""
    shared_slot_T: Tensor
    """[T] int32. Place among the tokens with several rows; -1 for one row."""
    shared_token_U: Tensor
    """[U] int32. The tokens with several rows, ascending."""
    shared_offsets: Tensor
    """[U + 1] int32. Where the rows of each begin in `shared_rows`."""
    shared_rows: Tensor
    """int32. All rows of the tokens with several, ascending for each token."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.owner_T.numel()

    @property
    def num_rows(self) -> int:
        """R."""
        return self.token_R.numel()

    @property
    def num_shared(self) -> int:
        """U."""
        return self.shared_token_U.numel()

    def to(self, device: torch.device) -> RowIndex:
        """The same index on another device."""
        return RowIndex(**_moved(self, device))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConvIndex:
    """Ancestors of rows and tokens, and the descendants that pre-order does not put where a chain has them.

    `M` counts *branching* tokens: those with a descendant less than J away that is not packed that many places after
    them. `Q` counts the tokens whose gradients these need, themselves included.

    Example (a b c d e z x y with parents -1 0 1 2 3 2 1 6, J = 2): b continues with c and with x, c with d and z:
        branch_token_M [1 2], branch_offsets [0 3 6], branch_distance [0 1 1 0 1 1], and the slots of
        b c x and c d z.
    """

    rows: RowIndex
    """Rows of the outputs; each token's own if they are in packed order."""
    ancestors_RJ: Tensor
    """[R, J] int32. Column `j` holds the token `j` steps above each row's token, -1 for none."""
    ancestors_TJ: Tensor
    """[T, J] int32. The same for tokens."""
    flags_T: Tensor
    """[T] int32. `TokenFlag`s; 0 for nearly all tokens."""
    slot_T: Tensor
    """[T] int32. Place among the Q tokens whose gradients branching tokens need; -1 for the others."""
    branch_token_M: Tensor
    """[M] int32. Branching tokens, ascending."""
    branch_offsets: Tensor
    """[M + 1] int32. Where the descendants of each begin in the two lists that follow."""
    branch_slot: Tensor
    """int32. Slot of each descendant, the token itself first, by distance and then in packed order."""
    branch_distance: Tensor
    """int32. Steps down to it, 0 to J - 1."""
    num_slots: int
    """Q."""

    @property
    def num_taps(self) -> int:
        """J, of the widest convolution that can use the index."""
        return self.ancestors_TJ.shape[1]

    @property
    def num_branching(self) -> int:
        """M."""
        return self.branch_token_M.numel()

    def to(self, device: torch.device) -> ConvIndex:
        """The same index on another device."""
        return replace(self, **_moved(self, device), rows=self.rows.to(device))


def row_index(num_tokens: int, runs: RunPlan | LaunchPlan | None = None) -> RowIndex:
    """Index the rows of a run order.

    Args:
        num_tokens: T.
        runs: Of the same tokens; None for one row a token, in packed order.

    Raises:
        ValueError: If there are too many rows for 32-bit indices.
    """
    token_R = np.arange(num_tokens) if runs is None else runs.token_R
    owner_T = np.arange(num_tokens) if runs is None else runs.owner_T
    if token_R.size > LARGEST_INDEX:
        raise ValueError(f"Got {token_R.size} rows, expected at most {LARGEST_INDEX}. Use smaller microbatches.")
    owned_token_R = np.full(token_R.size, -1)
    owned_token_R[owner_T] = np.arange(num_tokens)
    order = np.argsort(token_R, kind="stable")
    rows_T = np.bincount(token_R, minlength=num_tokens)
    shared_T = rows_T > 1
    shared_token_U = np.flatnonzero(shared_T)
    slot_T = np.full(num_tokens, -1)
    slot_T[shared_token_U] = np.arange(shared_token_U.size)
    return RowIndex(
        token_R=_int32(token_R),
        owned_token_R=_int32(owned_token_R),
        owner_T=_int32(owner_T),
        first_row_T=_int32(order[np.cumsum(rows_T) - rows_T]),
        shared_slot_T=_int32(slot_T),
        shared_token_U=_int32(shared_token_U),
        shared_offsets=_int32(np.concatenate([[0], np.cumsum(rows_T[shared_token_U])])),
        shared_rows=_int32(order[np.repeat(shared_T, rows_T)]),
    )


def conv_index(parent_T: NDArray[np.int64], num_taps: int, runs: RunPlan | LaunchPlan | None = None) -> ConvIndex:
    """Index short convolutions along the paths of a packed tree.

    Args:
        parent_T: [T] int64. Packed index of the token before, -1 at a root; smaller than the token's own.
        num_taps: J >= 2 of the widest convolution. Narrower ones can use the index, too.
        runs: The order of the outputs; None for the packed one.

    Raises:
        ValueError: If `num_taps` is less than 2, or there are too many rows for 32-bit indices.
    """
    if num_taps < 2:
        raise ValueError(f"Got num_taps {num_taps}, expected at least 2. A convolution of width 1 needs no index.")
    rows = row_index(parent_T.size, runs)
    ancestors_TJ = _ancestors(parent_T, num_taps)
    token_T, distance_J = np.arange(parent_T.size), np.arange(num_taps)
    # A descendant j steps down is packed exactly j places later iff nothing branches off in between.
    exception_TJ = (ancestors_TJ >= 0) & (ancestors_TJ != token_T[:, None] - distance_J)
    branching_T = np.zeros(parent_T.size, dtype=bool)
    branching_T[ancestors_TJ[exception_TJ]] = True
    descendant, distance = np.nonzero((ancestors_TJ >= 0) & branching_T[ancestors_TJ])
    branch = ancestors_TJ[descendant, distance]
    order = np.lexsort((descendant, distance, branch))
    needed, slot = np.unique(descendant, return_inverse=True)
    slot_T = np.full(parent_T.size, -1)
    slot_T[needed] = np.arange(needed.size)
    branch_token_M, counts = np.unique(branch, return_counts=True)
    flags_T = np.where(parent_T != token_T - 1, int(TokenFlag.BREAK), 0)
    flags_T |= np.where(rows.shared_slot_T.numpy() >= 0, int(TokenFlag.SHARED), 0)
    flags_T |= np.where(slot_T >= 0, int(TokenFlag.NEEDED), 0)
    return ConvIndex(
        rows=rows,
        flags_T=_int32(flags_T),
        ancestors_RJ=_int32(ancestors_TJ if runs is None else ancestors_TJ[runs.token_R]),
        ancestors_TJ=_int32(ancestors_TJ),
        slot_T=_int32(slot_T),
        branch_token_M=_int32(branch_token_M),
        branch_offsets=_int32(np.concatenate([[0], np.cumsum(counts)])),
        branch_slot=_int32(slot[order]),
        branch_distance=_int32(distance[order]),
        num_slots=needed.size,
    )


def _ancestors(parent_T: NDArray[np.int64], num_taps: int) -> NDArray[np.int64]:
    """[T, J]; the last entry of `parent_T` with one more -1 makes "none" its own ancestor."""
    above = np.append(parent_T, -1)
    columns = [np.arange(parent_T.size)]
    for _ in range(num_taps - 1):
        columns.append(above[columns[-1]])
    return np.stack(columns, axis=1)


def _int32(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))


def _moved(index: RowIndex | ConvIndex, device: torch.device) -> dict[str, Tensor]:
    tensors = {field.name: getattr(index, field.name) for field in fields(index)}
    return {name: value.to(device, non_blocking=True) for name, value in tensors.items() if isinstance(value, Tensor)}
