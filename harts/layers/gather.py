"""Row gathers whose backward adds up in float32 and in a fixed order.

A token that several branches replay receives one gradient from its owner and one from each replay. PyTorch's own
`index_select` adds them in the tensor's dtype, which loses the small ones in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def gather_rows(source: Tensor, index: Tensor) -> Tensor:
    """Rows of `source`, with a zero row wherever the index is one past the last.

    Args:
        source: [rows, ...] floating point.
        index: int64, any shape, `0 <= index <= rows`.

    Returns:
        [*index.shape, ...], equal to `torch.cat([source, zeros])[index]`. Its gradient is summed per source row in
        the order of `index`, in float32 (float64 for float64 sources).
    """
    return _GatherRows.apply(source, index)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.source_shape = source.shape
        padded = torch.cat([source, source.new_zeros(1, *source.shape[1:])])
        return padded.index_select(0, index.reshape(-1)).reshape(*index.shape, *source.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,) = grad_outputs
        (index,) = ctx.saved_tensors
        rows, *rest = ctx.source_shape
        accumulator = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros(rows + 1, *rest, dtype=accumulator)
        # On a GPU, `index_add_` adds in whatever order threads arrive; `index_put_` sorts first.
        total.index_put_((index.reshape(-1),), grad.reshape(-1, *rest).to(accumulator), accumulate=True)
        return total[:rows].to(grad.dtype), None
