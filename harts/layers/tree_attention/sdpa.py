"""Tree attention on SDPA, block of queries by block of queries.

Memory is bounded by one block's mask: the backward pass runs each block again instead of keeping its mask, and adds
key and value gradients into one buffer in block order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harts.layout.packed import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Options:
    layout: PackedLayout
    scale: float
    window: int | None


def tree_attention(
    query_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    *,
    layout: PackedLayout,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of every packed token over its path.

    Args:
        query_HTK: [query heads, T, K].
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads.
        layout: Of the same T tokens.
        scale: Multiplies the scores.
        window: Positions of the path that a query sees, its own included; None for all.

    Returns:
        [query heads, T, V]. Equals causal attention on each root-to-leaf path alone.
    """
    groups = query_HTK.shape[0] // key_HTK.shape[0]
    key_HTK, value_HTV = key_HTK.repeat_interleave(groups, dim=0), value_HTV.repeat_interleave(groups, dim=0)
    return _TreeAttention.apply(query_HTK, key_HTK, value_HTV, _Options(layout=layout, scale=scale, window=window))


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for queries, keys, mask in _blocks(options):
            output[:, queries] = _attend(query[:, queries], key[:, keys], value[:, keys], mask, options.scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        query, key, value = ctx.saved_tensors
        accumulator = torch.promote_types(key.dtype, torch.float32)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=accumulator), torch.zeros_like(value, dtype=accumulator)
        for queries, keys, mask in _blocks(ctx.options):
            inputs = [x.detach().requires_grad_() for x in (query[:, queries], key[:, keys], value[:, keys])]
            with torch.enable_grad():
                output = _attend(inputs[0], inputs[1], inputs[2], mask, ctx.options.scale)
            grad_query[:, queries], block_key, block_value = torch.autograd.grad(output, inputs, grad[:, queries])
            # A block names each key once, so indexed addition has no duplicates to lose.
            grad_key[:, keys] += block_key
            grad_value[:, keys] += block_value
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None


def _blocks(options: _Options) -> Iterator[tuple[slice, Tensor | slice, Tensor]]:
    """Queries, keys and the mask between them, block by block."""
    position_T, subtree_end_T = options.layout.position_T, options.layout.subtree_end_T
    device = position_T.device
    for block in options.layout.query_blocks:
        queries, keys = slice(block.start, block.end), block.keys_in_window(options.window)
        query = torch.arange(block.start, block.end, device=device)[:, None]
        key = torch.arange(keys.start, keys.stop, device=device) if isinstance(keys, slice) else keys
        mask = (key <= query) & (query < subtree_end_T[keys])
        if options.window is not None:
            mask &= position_T[queries, None] - position_T[keys] < options.window
        yield queries, keys, mask


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
