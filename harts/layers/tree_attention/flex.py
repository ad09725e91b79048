"""Tree attention through PyTorch's FlexAttention, compiled (arXiv 2412.05496).

Runs where PyTorch has Triton, in any of its head widths, and needs no other package. Slower than FlashAttention-4 on
Hopper. Its backward pass adds up every gradient in a fixed order: two runs give equal bits. Has no backward pass on a
CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from harts.layout.attention_blocks import AttentionBlocks, BlockLists

BLOCK_SIZE = (128, 128)
"""Queries and keys of a block, in both lists."""


def block_mask(blocks: AttentionBlocks) -> BlockMask:
    """Lists as FlexAttention takes them; made once a microbatch, for all layers.

    Args:
        blocks: With blocks of `BLOCK_SIZE` in both lists, on the device of the layers.
    """
    sizes = (blocks.forward.block_size, blocks.backward.block_size)
    if sizes != (BLOCK_SIZE, BLOCK_SIZE):
        raise ValueError(f"Attention blocks are {sizes}; FlexAttention's are {BLOCK_SIZE} in both lists.")
    subtree_end, position, window_end = blocks.subtree_end_T, blocks.position_T, blocks.window_end_T

    def on_path(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query < subtree_end[key])

    def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert window_end is not None
        return on_path(batch, head, query, key) & (position[query] < window_end[key])

    forward, backward = _lists(blocks.forward), _lists(blocks.backward)
    return BlockMask(
        seq_lengths=(blocks.num_tokens, blocks.num_tokens),
        kv_num_blocks=forward[0],
        kv_indices=forward[1],
        full_kv_num_blocks=forward[2],
        full_kv_indices=forward[3],
        q_num_blocks=backward[0],
        q_indices=backward[1],
        full_q_num_blocks=backward[2],
        full_q_indices=backward[3],
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=on_path if window_end is None else in_window,
    )


def tree_attention_flex(
    query_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    *,
    mask: BlockMask,
    scale: float,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every packed token over its path.

    Args:
        query_HTK: [query heads, T, K].
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads, K and V at least 16.
        mask: From `block_mask`, of the same T tokens. It holds the window.
        scale: Multiplies the scores.
        sink_H: [query heads]. Score of an attention sink, as in `sdpa.tree_attention`; None for no sink.

    Returns:
        [query heads, T, V]. The first call compiles, which takes seconds.
    """
    attend = functools.partial(
        _compiled(),
        query_HTK[None],
        key_HTK[None],
        value_HTV[None],
        block_mask=mask,
        scale=scale,
        enable_gqa=query_HTK.shape[0] != key_HTK.shape[0],
    )
    if sink_H is None:
        return attend()[0]
    output, auxiliary = attend(return_aux=AuxRequest(lse=True))
    # All probabilities shrink by what the sink takes: exp(lse) / (exp(lse) + exp(sink)).
    kept_HT = torch.sigmoid(auxiliary.lse[0] - sink_H.to(auxiliary.lse.dtype)[:, None])
    return (output[0] * kept_HT[..., None]).to(value_HTV.dtype)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _lists(lists: BlockLists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and indices for one batch entry and all heads; FlexAttention wants a column for every block."""
    columns = lists.partial_count.numel()  # as many as rows, since blocks are square
    partial, full = (
        F.pad(index, (0, columns - index.shape[1]))[None, None] for index in (lists.partial_index, lists.full_index)
    )
    return lists.partial_count[None, None], partial, lists.full_count[None, None], full
