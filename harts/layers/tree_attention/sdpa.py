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
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every packed token over its path.

    Args:
        query_HTK: [query heads, T, K].
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads.
        layout: Of the same T tokens.
        scale: Multiplies the scores.
        window: Positions of the path that a query sees, its own included; None for all.
        sink_H: [query heads]. Score of an attention sink, which takes its share of each softmax and has no value (the
            learned bias in the denominator of gpt-oss, arXiv 2508.10925); None for no sink.

    Returns:
        [query heads, T, V]. Equals causal attention on each root-to-leaf path alone.
    """
    groups = query_HTK.shape[0] // key_HTK.shape[0]
    key_HTK, value_HTV = key_HTK.repeat_interleave(groups, dim=0), value_HTV.repeat_interleave(groups, dim=0)
    options = _Options(layout=layout, scale=scale, window=window)
    if sink_H is None:
        return _TreeAttention.apply(options, query_HTK, key_HTK, value_HTV)
    # Widened here, so that what the blocks add to its gradient is added in float32.
    sink_H = sink_H.to(torch.promote_types(sink_H.dtype, torch.float32))
    return _TreeAttention.apply(options, query_HTK, key_HTK, value_HTV, sink_H)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: _Options, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, *sinks)
        ctx.options = options
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for queries, keys, mask in _blocks(options):
            inputs = (query[:, queries], key[:, keys], value[:, keys], *sinks)
            output[:, queries] = attend(inputs, mask, options.scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        query, key, value, *sinks = ctx.saved_tensors
        accumulator = torch.promote_types(key.dtype, torch.float32)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=accumulator), torch.zeros_like(value, dtype=accumulator)
        grad_sinks = [torch.zeros_like(sink) for sink in sinks]
        for queries, keys, mask in _blocks(ctx.options):
            parts = (query[:, queries], key[:, keys], value[:, keys], *sinks)
            inputs = tuple(x.detach().requires_grad_() for x in parts)
            with torch.enable_grad():
                output = attend(inputs, mask, ctx.options.scale)
            grad_query[:, queries], block_key, block_value, *block_sinks = torch.autograd.grad(
                output, inputs, grad[:, queries]
            )
            # A block names each key once, so indexed addition has no duplicates to lose.
            grad_key[:, keys] += block_key
            grad_value[:, keys] += block_value
            for total, block_sink in zip(grad_sinks, block_sinks, strict=True):
                total.add_(block_sink)
        return None, grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), *grad_sinks


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


def attend(inputs: tuple[Tensor, ...], mask: Tensor, scale: float) -> Tensor:
    """Queries, keys, values and, if there is one, the sink of one block to its outputs."""
    query, key, value, *sinks = inputs
    if not sinks:
        return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
    scores = (query @ key.transpose(-1, -2) * scale).to(sinks[0].dtype).masked_fill(~mask, float("-inf"))
    sink = sinks[0][:, None, None].expand(-1, query.shape[1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].to(value.dtype) @ value
