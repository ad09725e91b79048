"""What Mamba2 does around SSD: inputs times steps before it, the skip term and the way back to tokens after it.

Each would be several passes over float32 copies in PyTorch, together as long as SSD itself. Here everything is read and
written once, in its own dtype, and computed in float32.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 64
"""Of a row and a head, of a program."""


def times_steps(x_RHV: Tensor, step_RH: Tensor) -> Tensor:
    """`x * step`, rounded once.

    Args:
        x_RHV: [R, H, V] contiguous.
        step_RH: [R, H] float32, contiguous.

    Returns:
        [R, H, V] in the dtype of `x`.
    """
    value_RHV, num_pairs = torch.empty_like(x_RHV), step_RH.numel()
    _times_steps[(triton.cdiv(num_pairs, PAIRS),)](x_RHV, step_RH, value_RHV, num_pairs, **_tile(x_RHV))
    return value_RHV


def outputs_at_tokens(output_RHV: Tensor, x_RHV: Tensor, skip_H: Tensor, owner_T: Tensor) -> Tensor:
    """`output + skip * x` of the row that owns each token.

    Args:
        output_RHV: [R, H, V] contiguous, of SSD.
        x_RHV: [R, H, V] contiguous.
        skip_H: [H] float32.
        owner_T: [T] int32. Row of each token.

    Returns:
        [T, H, V] float32.
    """
    heads, width = x_RHV.shape[1:]
    total_THV = x_RHV.new_empty(owner_T.numel(), heads, width, dtype=torch.float32)
    num_pairs = owner_T.numel() * heads
    # Products and sums are rounded each, as PyTorch does.
    _outputs[(triton.cdiv(num_pairs, PAIRS),)](
        output_RHV, x_RHV, skip_H, owner_T, total_THV, num_pairs, HEADS=heads, **_tile(x_RHV), enable_fp_fusion=False
    )
    return total_THV


def input_gradients(
    dvalue_RHV: Tensor, dout_RHV: Tensor, x_RHV: Tensor, step_RH: Tensor, skip_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through `x * step` and `skip * x`.

    Args:
        dvalue_RHV: [R, H, V] contiguous. Of `x * step`.
        dout_RHV: [R, H, V] contiguous. Of `skip * x`; zero where a row's output is not taken.
        x_RHV: [R, H, V] contiguous.
        step_RH: [R, H] float32, contiguous.
        skip_H: [H] float32.

    Returns:
        Of x [R, H, V] in its dtype, of the steps [R, H] and of the skip weights [H], both float32. Sums are taken in
        the same order every time.
    """
    num_rows, heads = step_RH.shape
    dx_RHV, dstep_RH = torch.empty_like(x_RHV), torch.empty_like(step_RH)
    blocks = triton.cdiv(num_rows, PAIRS)
    partial = step_RH.new_empty(blocks, heads)
    _input_gradients[(blocks * heads,)](
        dvalue_RHV, dout_RHV, x_RHV, step_RH, skip_H, dx_RHV, dstep_RH, partial, num_rows, HEADS=heads, **_tile(x_RHV)
    )
    return dx_RHV, dstep_RH, partial.sum(0)


def _tile(x_RHV: Tensor) -> dict[str, int]:
    """What all kernels take: a tile holds some pairs of a row and a head, each with all of its channels."""
    width = x_RHV.shape[2]
    return {"WIDTH": width, "PAIRS": PAIRS, "CHANNELS": triton.next_power_of_2(width), "num_warps": 4}


@triton.jit
def _times_steps(x, step, value, num_pairs, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr):
    pair = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    inside = (pair < num_pairs)[:, None] & (channel < WIDTH)[None, :]
    place = pair[:, None] * WIDTH + channel[None, :]
    b_step = tl.load(step + pair, mask=pair < num_pairs, other=0.0)
    b_x = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(value + place, (b_x * b_step[:, None]).to(value.dtype.element_ty), mask=inside)


@triton.jit
def _outputs(
    output, x, skip, owner, total, num_pairs,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    channel, head, exists = tl.arange(0, CHANNELS), pair % HEADS, pair < num_pairs
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    row = tl.load(owner + pair // HEADS, mask=exists, other=0).to(tl.int64)
    place = (row * HEADS + head)[:, None] * WIDTH + channel[None, :]
    b_skip = tl.load(skip + head, mask=exists, other=0.0)
    b_o = tl.load(output + place, mask=inside, other=0.0).to(tl.float32)
    b_x = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + pair[:, None] * WIDTH + channel[None, :], b_o + b_skip[:, None] * b_x, mask=inside)


@triton.jit
def _input_gradients(
    dvalue, dout, x, step, skip, dx, dstep, dskip, num_rows,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    # All pairs of a program have one head, whose skip weight gets one sum of it. Neighbouring programs have
    # neighbouring heads of the same rows, which share lines of memory.
    block, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = (block * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)
    channel, exists = tl.arange(0, CHANNELS), row < num_rows
    inside = exists[:, None] & (channel < WIDTH)[None, :]
    place = (row * HEADS + head)[:, None] * WIDTH + channel[None, :]
    b_x = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    b_dvalue = tl.load(dvalue + place, mask=inside, other=0.0).to(tl.float32)
    b_dout = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
    b_step = tl.load(step + row * HEADS + head, mask=exists, other=0.0)
    b_dx = b_dvalue * b_step[:, None] + b_dout * tl.load(skip + head)
    tl.store(dx + place, b_dx.to(dx.dtype.element_ty), mask=inside)
    tl.store(dstep + row * HEADS + head, tl.sum(b_dvalue * b_x, 1), mask=exists)
    tl.store(dskip + block * HEADS + head, tl.sum(tl.sum(b_dout * b_x, 1), 0))
