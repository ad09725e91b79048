"""The gated norm after the delta rule, from rows of the run order back to packed tokens.

In PyTorch, taking each token's own row, the norm and its gate take eleven passes, most of them over float32 copies,
which autograd keeps: longer than the rule itself. Here outputs and gates are read once and what the output projection
needs is written once, rounded where transformers rounds.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.inputs import GatedNorm, GatedNormModule
from harts.layers.short_conv.kernels import sigmoid
from harts.layout.conv_index import RowIndex

TILE = 4096
"""Channels of a program: of so many pairs of a row (or token) and a head, each with all of its own."""


def normed_outputs(output_RHV: Tensor, norm: GatedNorm, index: RowIndex) -> Tensor:
    """`weight * RMSNorm(output) * activation(gate)` of each token's own row.

    Args:
        output_RHV: [R, H, V] of the delta rule.
        norm: Of the T tokens, on the same device.
        index: Of the same rows and tokens.

    Returns:
        [T, H, V] in the dtype of `output`. Rows that are replays receive a gradient of zero.
    """
    # Autograd is not given the norm, which would keep the gate where activations are recomputed.
    how = (norm.module, norm.rounded, index)
    return _NormedOutputs.apply(output_RHV, norm.gate_THV, norm.module.weight, how)


class _NormedOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output_RHV: Tensor,
        gate_THV: Tensor,
        weight_V: Tensor,
        how: tuple[GatedNormModule, bool, RowIndex],
    ) -> Tensor:
        module, rounded, index = how
        output_RHV, gate_THV = output_RHV.contiguous(), gate_THV.contiguous()
        normed_THV = torch.empty_like(gate_THV, dtype=output_RHV.dtype)
        num_pairs, shape = index.num_tokens * output_RHV.shape[1], _shape(output_RHV, module, rounded=rounded)
        _outputs[(triton.cdiv(num_pairs, shape["PAIRS"]),)](
            output_RHV, gate_THV, weight_V, index.owner_T, normed_THV, num_pairs,
            module.variance_epsilon, **shape,
        )  # fmt: skip
        ctx.save_for_backward(output_RHV, gate_THV, weight_V)
        ctx.how = how
        return normed_THV

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        output_RHV, gate_THV, weight_V = ctx.saved_tensors
        module, rounded, index = ctx.how
        doutput_RHV, dgate_THV = torch.empty_like(output_RHV), torch.empty_like(gate_THV)
        num_pairs, shape = index.num_rows * output_RHV.shape[1], _shape(output_RHV, module, rounded=rounded)
        blocks = triton.cdiv(num_pairs, shape["PAIRS"])
        dweight = weight_V.new_empty(blocks, weight_V.numel(), dtype=torch.float32)
        _gradients[(blocks,)](
            output_RHV, gate_THV, weight_V, index.owned_token_R, grad_outputs[0].contiguous(), doutput_RHV, dgate_THV,
            dweight, num_pairs, module.variance_epsilon, **shape,
        )  # fmt: skip
        return doutput_RHV, dgate_THV, dweight.sum(0).to(weight_V.dtype), None


def _shape(output_RHV: Tensor, module: GatedNormModule, *, rounded: bool) -> dict[str, Any]:
    """The compile-time arguments that both passes take."""
    heads, width = output_RHV.shape[1:]
    assert module.activation in {"silu", "sigmoid"}, module.activation
    # Triton's interpreter knows no PTX.
    how = {"SILU": module.activation == "silu", "ROUNDED": rounded, "APPROXIMATE": output_RHV.is_cuda}
    channels = triton.next_power_of_2(width)
    return {**how, "HEADS": heads, "WIDTH": width, "PAIRS": max(1, TILE // channels), "CHANNELS": channels}


@triton.jit
def _places(first, second, exists, HEADS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Where a tile of pairs is, by row (or token) and head; and which of it exists."""
    channel = tl.arange(0, CHANNELS)
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    return (first.to(tl.int64) * HEADS + second)[:, None] * WIDTH + channel[None, :], inside


@triton.jit
def _normalised(x, epsilon, WIDTH: tl.constexpr):
    """Each row over the root of its mean square, and the inverse of that root."""
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / WIDTH + epsilon)
    return x * inverse[:, None], inverse[:, None]


@triton.jit
def _weighted(normal, weight, output, ROUNDED: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Weights, what they weigh, and the products, both as rounded between PyTorch's passes."""
    channel = tl.arange(0, CHANNELS)
    b_weight = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)[None, :]
    if ROUNDED:
        normal = normal.to(output.dtype.element_ty).to(tl.float32)
    product = normal * b_weight
    if ROUNDED and weight.dtype.element_ty == output.dtype.element_ty:
        product = product.to(output.dtype.element_ty).to(tl.float32)
    return b_weight, normal, product


@triton.jit
def _outputs(
    output, gate, weight, owner, normed, num_pairs, epsilon,
    SILU: tl.constexpr, ROUNDED: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    exists, token, head = pair < num_pairs, pair // HEADS, pair % HEADS
    row = tl.load(owner + token, mask=exists, other=0)
    source, inside = _places(row, head, exists, HEADS, WIDTH, CHANNELS)
    place, _ = _places(token, head, exists, HEADS, WIDTH, CHANNELS)
    b_x = tl.load(output + source, mask=inside, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    b_n, _ = _normalised(b_x, epsilon, WIDTH)
    _, _, b_product = _weighted(b_n, weight, output, ROUNDED, WIDTH, CHANNELS)
    b_active = sigmoid(b_gate, APPROXIMATE)
    if SILU:
        b_active *= b_gate
    tl.store(normed + place, (b_product * b_active).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gradients(
    output, gate, weight, owned_token, dnormed, doutput, dgate, dweight, num_pairs, epsilon,
    SILU: tl.constexpr, ROUNDED: tl.constexpr, APPROXIMATE: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # Over rows: every token owns one, and rows that no token owns get zeros.
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    exists, row, head = pair < num_pairs, pair // HEADS, pair % HEADS
    token = tl.load(owned_token + row, mask=exists, other=-1)
    target, inside = _places(row, head, exists, HEADS, WIDTH, CHANNELS)
    place, owned = _places(token, head, token >= 0, HEADS, WIDTH, CHANNELS)
    b_x = tl.load(output + target, mask=owned, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + place, mask=owned, other=0.0).to(tl.float32)
    b_dy = tl.load(dnormed + place, mask=owned, other=0.0).to(tl.float32)
    b_n, b_inverse = _normalised(b_x, epsilon, WIDTH)
    b_weight, b_rounded, b_product = _weighted(b_n, weight, output, ROUNDED, WIDTH, CHANNELS)
    b_active = sigmoid(b_gate, APPROXIMATE)
    b_slope = b_active * (1.0 - b_active)
    if SILU:
        b_slope = b_active + b_gate * b_slope
        b_active *= b_gate

    tl.store(dgate + place, (b_dy * b_product * b_slope).to(dgate.dtype.element_ty), mask=owned)
    b_dproduct, channel = b_dy * b_active, tl.arange(0, CHANNELS)
    tl.store(dweight + tl.program_id(0) * WIDTH + channel, tl.sum(b_dproduct * b_rounded, 0), mask=channel < WIDTH)
    b_dn = b_dproduct * b_weight
    b_dx = b_inverse * (b_dn - b_n * (tl.sum(b_dn * b_n, 1) / WIDTH)[:, None])
    tl.store(doutput + target, b_dx.to(doutput.dtype.element_ty), mask=inside)
