"""Activated queries, keys and values of lightning attention, from packed tokens straight into run order.

A projection leaves those of a head side by side. Activating, taking rows and cutting would be three passes each way;
here each number is read and written once. `harts.layers.rows.take_rows` is the definition.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.activation import Activation
from harts.layers.rows import load_summed, sum_shared_rows
from harts.layers.short_conv.kernels import sigmoid
from harts.layout.conv_index import RowIndex

PIECES = 3
"""Queries, keys and values."""
ROWS, CHANNELS = 8, 512
"""Of a program."""


def activated_rows(mixed_THM: Tensor, index: RowIndex, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in run order.

    Args:
        mixed_THM: [T, H, 3 K] in pre-order: a head's queries, keys and values side by side.
        index: Of the T tokens.
        activation: Of all of them, computed in float32 and rounded once; what is projected is rounded already.

    Returns:
        Three contiguous [R, H, K] in the dtype of `mixed_THM`. A token's gradient is summed over its rows in their
        order, in float32.
    """
    return _ActivatedRows.apply(mixed_THM, index, activation)


class _ActivatedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed_THM: Tensor, index: RowIndex, activation: Activation) -> tuple[Tensor, ...]:
        mixed_THM = mixed_THM.contiguous()
        _, heads, mixed_width = mixed_THM.shape
        width = mixed_width // PIECES
        pieces = tuple(mixed_THM.new_empty(index.num_rows, heads, width) for _ in range(PIECES))
        _activate[_grid(index.num_rows, heads * width)](
            mixed_THM, index.token_R, *pieces, index.num_rows, **_shape(mixed_THM, activation)
        )
        ctx.save_for_backward(mixed_THM)
        ctx.index, ctx.activation = index, activation
        return pieces

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (mixed_THM,) = ctx.saved_tensors
        index: RowIndex = ctx.index
        grads = tuple(grad.contiguous() for grad in grad_outputs)
        channels = grads[0].shape[1] * grads[0].shape[2]
        sums = mixed_THM.new_empty(PIECES, index.num_shared, channels, dtype=torch.float32)
        for grad, into in zip(grads, sums, strict=True):
            sum_shared_rows(grad.view(index.num_rows, channels), index, into, at_tokens=False)
        dmixed_THM = torch.empty_like(mixed_THM)
        _gradient[_grid(index.num_tokens, channels)](
            mixed_THM, index.first_row_T, index.shared_slot_T, *grads, sums, dmixed_THM, index.num_tokens,
            index.num_shared, **_shape(mixed_THM, ctx.activation),
        )  # fmt: skip
        return dmixed_THM, None, None


def _grid(num_rows: int, channels: int) -> tuple[int, int, int]:
    return triton.cdiv(num_rows, ROWS), triton.cdiv(channels, CHANNELS), PIECES


def _shape(mixed_THM: Tensor, activation: Activation) -> dict[str, Any]:
    """The compile-time arguments that both passes take."""
    _, heads, mixed_width = mixed_THM.shape
    # Triton's interpreter knows no PTX.
    how = {"SILU": activation != "none", "APPROXIMATE": mixed_THM.is_cuda}
    tile = {"HEADS": heads, "WIDTH": mixed_width // PIECES, "ROWS": ROWS, "CHANNELS": CHANNELS}
    return {**how, **tile, "num_warps": 4}


@triton.jit
def _tile(HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows, channels of the piece, which of them exist, and where they are in what is mixed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mixed = (channel // WIDTH) * (3 * WIDTH) + tl.program_id(2) * WIDTH + channel % WIDTH
    return row.to(tl.int64), channel, (channel < HEADS * WIDTH)[None, :], mixed


@triton.jit
def _piece(p0, p1, p2):
    piece = tl.program_id(2)
    return tl.where(piece == 0, p0, tl.where(piece == 1, p1, p2))


@triton.jit
def _activate(
    mixed, token_of_row, q, k, v, num_rows,
    SILU: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, channel, inside, place = _tile(HEADS, WIDTH, ROWS, CHANNELS)
    inside &= (row < num_rows)[:, None]
    token = tl.load(token_of_row + row, mask=row < num_rows, other=0).to(tl.int64)
    b_x = tl.load(mixed + token[:, None] * (HEADS * WIDTH * 3) + place[None, :], mask=inside, other=0.0).to(tl.float32)
    if SILU:
        b_x *= sigmoid(b_x, APPROXIMATE)
    target = _piece(q, k, v) + row[:, None] * (HEADS * WIDTH) + channel[None, :]
    tl.store(target, b_x.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(
    mixed, first_row, shared_slot, dq, dk, dv, sums, dmixed, num_tokens, num_shared,
    SILU: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, channel, inside, place = _tile(HEADS, WIDTH, ROWS, CHANNELS)
    in_tokens = token < num_tokens
    inside &= in_tokens[:, None]
    row = tl.load(first_row + token, mask=in_tokens, other=0).to(tl.int64)
    slot = tl.load(shared_slot + token, mask=in_tokens, other=-1).to(tl.int64)
    own = _piece(dq, dk, dv) + row[:, None] * (HEADS * WIDTH) + channel[None, :]
    summed = sums + (tl.program_id(2) * num_shared + slot)[:, None] * (HEADS * WIDTH) + channel[None, :]
    b_d = load_summed(own, summed, inside, (slot >= 0)[:, None])
    place = token[:, None] * (HEADS * WIDTH * 3) + place[None, :]
    if SILU:
        b_x = tl.load(mixed + place, mask=inside, other=0.0).to(tl.float32)
        b_sigmoid = sigmoid(b_x, APPROXIMATE)
        b_d *= b_sigmoid * (1.0 + b_x * (1.0 - b_sigmoid))
    tl.store(dmixed + place, b_d.to(dmixed.dtype.element_ty), mask=inside)
