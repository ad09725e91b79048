"""Decays of Kimi Delta Attention, from packed projections straight into run order.

In PyTorch the gate takes nine passes over float32 copies, and rows of its result are taken by one more. Here what is
projected is read once and the decays are written once.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.inputs import DecayGate
from harts.layers.rows import load_summed, sum_shared_rows
from harts.layers.short_conv.kernels import sigmoid
from harts.layout.conv_index import RowIndex

ROWS = 32
"""Of a program, which has all channels of one head."""
LINEAR = tl.constexpr(20.0)
"""From here on softplus is the identity, as in transformers."""


def decay_rows(gate: DecayGate, index: RowIndex) -> Tensor:
    """Log-decays in run order.

    Args:
        gate: Of T tokens, on the device.
        index: Of the same tokens.

    Returns:
        [R, H, K] float32. A token's gradient is summed over its rows in their order, in float32.
    """
    # Autograd is not given the gate, which would keep tensors where activations are recomputed.
    how = (gate.lower_bound, gate.dtype, index)
    return _DecayRows.apply(gate.projected_TD, gate.log_rate_H, gate.bias_D, how)


class _DecayRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected_TD: Tensor,
        log_rate_H: Tensor,
        bias_D: Tensor,
        how: tuple[float | None, torch.dtype, RowIndex],
    ) -> Tensor:
        lower_bound, dtype, index = how
        projected_TD, log_rate_H, bias_D = projected_TD.contiguous(), log_rate_H.contiguous(), bias_D.contiguous()
        heads = log_rate_H.numel()
        decay_RHK = bias_D.new_empty(index.num_rows, heads, bias_D.numel() // heads, dtype=torch.float32)
        _decays[(triton.cdiv(index.num_rows, ROWS) * heads,)](
            projected_TD, log_rate_H, bias_D, index.token_R, decay_RHK, index.num_rows, lower_bound or 0.0,
            ROUNDED=dtype != torch.float32, **_shape(projected_TD, heads, lower_bound),
        )  # fmt: skip
        ctx.save_for_backward(projected_TD, log_rate_H, bias_D)
        ctx.how = how
        return decay_RHK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        projected_TD, log_rate_H, bias_D = ctx.saved_tensors
        lower_bound, _, index = ctx.how
        heads, channels = log_rate_H.numel(), bias_D.numel()
        grad = grad_outputs[0].contiguous()
        sums = grad.new_empty(index.num_shared, channels)
        sum_shared_rows(grad.view(index.num_rows, channels), index, sums, at_tokens=False)
        blocks = triton.cdiv(index.num_tokens, ROWS)
        dprojected_TD = torch.empty_like(projected_TD)
        dbias, dlog_rate = grad.new_empty(blocks, channels), grad.new_empty(blocks, heads)
        _gradients[(blocks * heads,)](
            projected_TD, log_rate_H, bias_D, index.first_row_T, index.shared_slot_T, grad, sums, dprojected_TD, dbias,
            dlog_rate, index.num_tokens, lower_bound or 0.0, **_shape(projected_TD, heads, lower_bound),
        )  # fmt: skip
        return dprojected_TD, dlog_rate.sum(0).to(log_rate_H.dtype), dbias.sum(0).to(bias_D.dtype), None


def _shape(projected_TD: Tensor, heads: int, lower_bound: float | None) -> dict[str, Any]:
    """The compile-time arguments that both passes take."""
    width = projected_TD.shape[1] // heads
    # Triton's interpreter knows no PTX.
    how = {"BOUNDED": lower_bound is not None, "APPROXIMATE": projected_TD.is_cuda}
    tile = {"HEADS": heads, "WIDTH": width, "ROWS": ROWS, "CHANNELS": triton.next_power_of_2(width)}
    return {**how, **tile, "num_warps": 4}


@triton.jit
def _tile(num_rows, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Rows, which of them exist, the head, its channels, and which of the tile exist."""
    # Neighbouring programs have neighbouring heads of the same rows, which share lines of memory.
    row = ((tl.program_id(0) // HEADS) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    channel, exists = tl.arange(0, CHANNELS), row < num_rows
    return row, exists, tl.program_id(0) % HEADS, channel, exists[:, None] & (channel < WIDTH)[None, :]


@triton.jit
def _softplus(x):
    return tl.where(x > LINEAR, x, tl.log(1.0 + tl.exp(tl.minimum(x, LINEAR))))


@triton.jit
def _decays(
    projected, log_rate, bias, token_of_row, decay, num_rows, lower_bound,
    ROUNDED: tl.constexpr, BOUNDED: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    row, exists, head, channel, inside = _tile(num_rows, HEADS, WIDTH, ROWS, CHANNELS)
    token = tl.load(token_of_row + row, mask=exists, other=0).to(tl.int64)
    b_rate = tl.exp(tl.load(log_rate + head).to(tl.float32))
    b_bias = tl.load(bias + head * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    b_x = tl.load(projected + (token * HEADS + head)[:, None] * WIDTH + channel[None, :], mask=inside, other=0.0)
    b_x = b_x.to(tl.float32) + b_bias[None, :]
    b_decay = lower_bound * sigmoid(b_rate * b_x, APPROXIMATE) if BOUNDED else -b_rate * _softplus(b_x)
    if ROUNDED:
        b_decay = b_decay.to(projected.dtype.element_ty).to(tl.float32)
    tl.store(decay + (row * HEADS + head)[:, None] * WIDTH + channel[None, :], b_decay, mask=inside)


@triton.jit
def _gradients(
    projected, log_rate, bias, first_row, shared_slot, ddecay, sums, dprojected, dbias, dlog_rate, num_tokens,
    lower_bound, BOUNDED: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    token, exists, head, channel, inside = _tile(num_tokens, HEADS, WIDTH, ROWS, CHANNELS)
    row = tl.load(first_row + token, mask=exists, other=0).to(tl.int64)
    slot = tl.load(shared_slot + token, mask=exists, other=-1).to(tl.int64)
    own = ddecay + (row * HEADS + head)[:, None] * WIDTH + channel[None, :]
    summed = sums + (slot * HEADS + head)[:, None] * WIDTH + channel[None, :]
    b_d = load_summed(own, summed, inside, (slot >= 0)[:, None])

    b_rate = tl.exp(tl.load(log_rate + head).to(tl.float32))
    b_bias = tl.load(bias + head * WIDTH + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    place = (token * HEADS + head)[:, None] * WIDTH + channel[None, :]
    b_x = tl.load(projected + place, mask=inside, other=0.0).to(tl.float32) + b_bias[None, :]
    if BOUNDED:
        b_gate = sigmoid(b_rate * b_x, APPROXIMATE)
        b_dx = b_d * (lower_bound * b_rate) * b_gate * (1.0 - b_gate)
        b_dlog = b_dx * b_x
    else:
        b_dx = -b_rate * b_d * tl.where(b_x > LINEAR, 1.0, sigmoid(b_x, APPROXIMATE))
        b_dlog = -b_rate * b_d * _softplus(b_x)
    tl.store(dprojected + place, b_dx.to(dprojected.dtype.element_ty), mask=inside)
    block = (tl.program_id(0) // HEADS).to(tl.int64) * HEADS + head
    tl.store(dbias + block * WIDTH + channel, tl.sum(b_dx, 0), mask=channel < WIDTH)
    tl.store(dlog_rate + block, tl.sum(tl.sum(tl.where(inside, b_dlog, 0.0), 1), 0))
