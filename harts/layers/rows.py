"""Gathers between tokens and the rows of a run order, in Triton, with deterministic gradients.

For streams as narrow as gates and as wide as keys. Imports Triton: only what runs on a GPU imports this file;
`gather.py` is the definition.
"""

# Triton's kernels: names of compile-time arguments, and launches by subscript.
# ruff: noqa: N803, PLR0913, PLR0917
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layout.conv_index import RowIndex

TILE = 4096
"""Elements that a program copies."""


def take_rows(source: Tensor, index: RowIndex) -> Tensor:
    """The rows of a run order from a stream of tokens.

    Args:
        source: [T, ...] contiguous after the first dimension.
        index: Of the same T tokens, on the same device.

    Returns:
        [R, ...], equal to `source[token_R]`. Its gradient is summed over each token's rows in their order, in float32.
    """
    return _TakeRows.apply(source, index)


def owned_rows(output: Tensor, index: RowIndex) -> Tensor:
    """Each token's own row of a run order.

    Args:
        output: [R, ...].
        index: Of the R rows, on the same device.

    Returns:
        [T, ...], equal to `output[owner_T]`. Rows that are replays receive a gradient of zero.
    """
    return _OwnedRows.apply(output, index)


def sum_shared_rows(grad: Tensor, index: RowIndex, into: Tensor, *, at_tokens: bool) -> None:
    """Sums over the rows of each token that has several, in their order and in float32.

    Args:
        grad: [R, N] contiguous.
        index: Of the R rows.
        into: [T, N] or [U, N], any row stride. Where the sums go; no other row is written.
        at_tokens: Whether a sum goes to its token's row of `into`, or to the token's shared slot.
    """
    if index.num_shared == 0:
        return
    width = grad.shape[1]
    block = min(triton.next_power_of_2(width), 512)
    _sum_shared_kernel[(index.num_shared, triton.cdiv(width, block))](
        grad,
        into,
        index.shared_offsets,
        index.shared_rows,
        index.shared_token_U,
        width,
        into.stride(0),
        AT_TOKENS=at_tokens,
        BLOCK=block,
        num_warps=max(1, min(4, block // 128)),
    )


def copy_rows(source: Tensor, index: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Rows by their numbers, without a gradient.

    Args:
        source: [N, ...].
        index: int32, one dimension; -1 for zeros.
        dtype: Of the result; that of the source if None.

    Returns:
        `source[index]`.
    """
    source = source.contiguous()
    copied = source.new_empty(index.numel(), *source.shape[1:], dtype=dtype)
    width = source[0].numel()
    block = min(triton.next_power_of_2(width), 1024)
    rows = TILE // block
    _copy_rows_kernel[(triton.cdiv(index.numel(), rows), triton.cdiv(width, block))](
        source, copied, index, index.numel(), width, ROWS=rows, BLOCK=block, num_warps=4
    )
    return copied


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return copy_rows(source, index.token_R)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        index: RowIndex = ctx.index
        grad = grad_outputs[0].contiguous()
        total = copy_rows(grad, index.first_row_T)
        sum_shared_rows(grad.view(index.num_rows, -1), index, total.view(index.num_tokens, -1), at_tokens=True)
        return total, None


class _OwnedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, index: RowIndex) -> Tensor:
        ctx.index = index
        return copy_rows(output, index.owner_T)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return copy_rows(grad_outputs[0], ctx.index.owned_token_R), None


@triton.jit
def _copy_rows_kernel(source_ptr, copied_ptr, index_ptr, num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + row, mask=row < num_rows, other=-1)
    inside = (column < width)[None, :]
    place = index.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(source_ptr + place, mask=(index >= 0)[:, None] & inside, other=0.0)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(copied_ptr + place, values.to(copied_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & inside)


@triton.jit
def load_summed(own, sums, inside, shared):
    """Gradients of tokens in float32: of a token's only row, or what `sum_shared_rows` made of several.

    Args:
        own, sums: Where both are, of a tile.
        inside: Which of the tile exist.
        shared: Whether a token has several rows.
    """
    gradient = tl.load(own, mask=inside & (shared == 0), other=0.0).to(tl.float32)
    return gradient + tl.load(sums, mask=inside & shared, other=0.0)


@triton.jit
def _sum_shared_kernel(
    grad_ptr,
    into_ptr,
    offset_ptr,
    row_ptr,
    token_ptr,
    width,
    stride_into,
    AT_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    shared = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    # Unrolled, so that several loads are under way: many rollouts may replay the same tokens.
    for entry in tl.range(tl.load(offset_ptr + shared), tl.load(offset_ptr + shared + 1), loop_unroll_factor=4):
        row = tl.load(row_ptr + entry).to(tl.int64)
        total += tl.load(grad_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    target = shared
    if AT_TOKENS:
        target = tl.load(token_ptr + shared)
    place = target.to(tl.int64) * stride_into + column
    tl.store(into_ptr + place, total.to(into_ptr.dtype.element_ty), mask=inside)
