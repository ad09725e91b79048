"""Tree attention on Hopper through FlashAttention-4.

The kernels are called below the package's public functions: those pick tiles for causal attention, and for a
block-sparse backward pass of wide heads one that is 18% slower than the best. All of these choices are in
`tiles_for`, made for one version of the package. Supports head widths up to 256 in bfloat16 and float16; keys and
values are not repeated for grouped queries.
"""

# Installed with the `gpu` extra only.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import cutlass
import torch
from cutlass import cute
from flash_attn.cute import interface, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from torch import Tensor

from harts.layers.tree_attention.choice import FLASH_ATTENTION_VERSION, flash4_widths
from harts.layers.tree_attention.flash4_kernels import (
    TreeBackward,
    TreeBackwardInIntervals,
    backward_pass,
    forward_pass,
)
from harts.layout.attention_blocks import AttentionBlocks, BlockLists


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """How the kernels cut up queries and keys."""

    forward: tuple[int, int]
    """Queries and keys of a tile of the forward pass; the forward block lists have the same blocks."""
    pack_gqa: bool = True
    """Whether the queries of a key head share a tile in the forward pass."""
    backward: interface.BwdConfig
    """Tile, stages and operand orders of the backward pass."""
    intervals: bool = True
    """Whether the backward pass works out the queries of a key block instead of looking them up."""

    @property
    def backward_block(self) -> tuple[int, int]:
        """Block size of the backward lists: the tile's."""
        return self.backward.m_block_size, self.backward.n_block_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Flash4Call:
    """What one call is given beside queries, keys and values."""

    blocks: AttentionBlocks
    """With the block sizes of `tiles`."""
    scale: float
    """Multiplies the scores."""
    tiles: Tiles
    """Of the head widths."""
    deterministic: bool = False
    """Whether the query gradient is added up in a fixed order."""


def tree_attention_flash4(
    query_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    *,
    blocks: AttentionBlocks,
    scale: float,
    sink_H: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Attention of every packed token over its path.

    Args:
        query_HTK: [query heads, T, K] bfloat16 or float16 on an NVIDIA Hopper GPU. Views of a [T, heads, K] tensor are
            read in place.
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads.
        blocks: Of the same T tokens, with the block sizes of `tiles_for(K, V)`. It holds the window.
        scale: Multiplies the scores.
        sink_H: [query heads]. Score of an attention sink, as in `sdpa.tree_attention`; None for no sink.
        deterministic: Whether two runs give equal bits. FlashAttention-4 fixes the order of its additions on Hopper
            only where it visits every block, so the backward pass then costs T x T however few pairs are visible.

    Returns:
        [query heads, T, V], a view of a [T, heads, V] tensor.

    Raises:
        ValueError: For head widths or a version of flash-attn-4 that this file has no tiles for, or lists of others.
    """
    call = Flash4Call(
        blocks=blocks,
        scale=scale,
        tiles=tiles_for(query_HTK.shape[-1], value_HTV.shape[-1]),
        deterministic=deterministic,
    )
    return attend(query_HTK, key_HTK, value_HTV, call=call, sink_H=sink_H)


def attend(
    query_HTK: Tensor, key_HTK: Tensor, value_HTV: Tensor, *, call: Flash4Call, sink_H: Tensor | None = None
) -> Tensor:
    """`tree_attention_flash4` with tiles of the caller's choice."""
    blocks, tiles = call.blocks, call.tiles
    got = (blocks.num_tokens, blocks.forward.block_size, blocks.backward.block_size)
    expected = (query_HTK.shape[1], tiles.forward, tiles.backward_block)
    if got != expected:
        raise ValueError(
            f"Attention blocks are of (tokens, forward block, backward block) {got}, but the call needs {expected}. "
            "Build them with the sizes of tiles_for(K, V) from the layout of the same tokens."
        )
    # The kernels take [batch, T, heads, width].
    query, key, value = (x.transpose(0, 1)[None] for x in (query_HTK, key_HTK, value_HTV))
    # Widened here, so that the gradient of a sink is not rounded before autograd adds it up.
    sinks = () if sink_H is None else (sink_H.float(),)
    return _TreeAttention.apply(call, query, key, value, *sinks)[0].transpose(0, 1)


def tiles_for(head_width: int, value_width: int) -> Tiles:
    """The best measured tiles for the widths of keys and values.

    Raises:
        ValueError: For another version of flash-attn-4 than the tested one, or widths it does not support.
    """
    _check_version()
    if problem := flash4_widths(head_width, value_width):
        raise ValueError(f'{problem} Use kernel "flex" for this model.')
    if head_width <= 128:
        return Tiles(forward=(128, 128), backward=_backward(64, 128, stages=(2, 2, 2)))
    if head_width <= 192:
        narrow = value_width <= 128
        return Tiles(
            forward=(128, 128 if narrow else 112),
            backward=_backward(64, 96, stages=(2, 2 if narrow else 1, 1), swap=False),
        )
    return Tiles(
        forward=(128, 80),
        backward=_backward(64, 48, stages=(2, 1, 1), swap=False, layouts=(1, 1, 1)),
        # 0.943 of dense attention's speed with intervals, 0.956 with the package's loops.
        intervals=False,
    )


def _backward(
    queries: int,
    keys: int,
    *,
    stages: tuple[int, int, int],
    swap: bool = True,
    layouts: tuple[int, int, int] = (1, 2, 1),
) -> interface.BwdConfig:
    """A backward tile whose score product (`swap`) or else whose key and value gradients have their operands swapped.

    Args:
        queries, keys: Of a tile.
        stages: Buffers of queries, output gradients and probabilities.
        swap: Which of the two.
        layouts: Warp groups along the rows of the scores, of the key and value gradients, of the query gradient.
    """
    return interface.BwdConfig(
        m_block_size=queries,
        n_block_size=keys,
        num_stages_Q=stages[0],
        num_stages_dO=stages[1],
        num_stages_PdS=stages[2],
        SdP_swapAB=swap,
        dKV_swapAB=not swap,
        dQ_swapAB=queries % 64 != 0,
        AtomLayoutMSdP=layouts[0],
        AtomLayoutNdKV=layouts[1],
        AtomLayoutMdQ=layouts[2],
    )


@functools.cache
def _check_version() -> None:
    # Functions, arguments and tiles used here are not part of the package's public interface.
    installed = version("flash-attn-4")
    if installed != FLASH_ATTENTION_VERSION:
        raise ValueError(
            f"flash-attn-4 {installed} is installed, but tree attention is tested with {FLASH_ATTENTION_VERSION} and "
            f"calls functions that change between versions. Run `pip install "
            f'flash-attn-4=={FLASH_ATTENTION_VERSION}`, or use kernel "flex".'
        )


@cute.jit
def _on_path(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Whether a query lies in a key's subtree."""
    end = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
    return (q_idx >= kv_idx) & (q_idx < end)


@cute.jit
def _in_window(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Whether a query lies in a key's subtree and before the end of its window."""
    end = utils.scalar_to_ssa(aux_tensors[0][kv_idx[0]], cutlass.Int32)
    position = utils.scalar_to_ssa(aux_tensors[3][q_idx[0]], cutlass.Int32)
    window_end = utils.scalar_to_ssa(aux_tensors[4][kv_idx[0]], cutlass.Int32)
    return (q_idx >= kv_idx) & (q_idx < end) & (position < window_end)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Flash4Call, query: Tensor, key: Tensor, value: Tensor, *sinks: Tensor) -> Tensor:
        tiles = call.tiles
        output, lse, *_ = forward_pass()(
            query,
            key,
            value,
            softmax_scale=call.scale,
            tile_mn=tiles.forward,
            mma_pv_is_rs=True,
            intra_wg_overlap=True,
            pack_gqa=tiles.pack_gqa and query.shape[2] > key.shape[2],
            return_lse=True,
            block_sparse_tensors=_sparse(call.blocks.forward),
            learnable_sink=sinks[0] if sinks else None,
            **_mask(call.blocks, call.blocks.forward),
        )
        ctx.call = call
        ctx.save_for_backward(query, key, value, output, lse, *sinks)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *sinks = ctx.saved_tensors
        call: Flash4Call = ctx.call
        grads = backward_pass(call.tiles.backward, _backward_kernel(call))(
            query,
            key,
            value,
            output,
            grad_outputs[0],
            lse,
            softmax_scale=call.scale,
            deterministic=call.deterministic,
            block_sparse_tensors=None if call.deterministic else _sparse(call.blocks.backward),
            learnable_sink=sinks[0] if sinks else None,
            **_mask(call.blocks, call.blocks.backward),
        )
        return None, *grads


def _backward_kernel(call: Flash4Call) -> type[FlashAttentionBackwardSm90]:
    # The package adds up in a fixed order only where it visits every block.
    if call.deterministic:
        return FlashAttentionBackwardSm90
    # Queries that see a key through a window are no interval.
    return TreeBackwardInIntervals if call.tiles.intervals and call.blocks.window_end_T is None else TreeBackward


def _mask(blocks: AttentionBlocks, lists: BlockLists) -> dict[str, Any]:
    """How the package hides pairs where no `TreeMask` does, and the tensors that both index, as `TreeMask` says."""
    tensors = [blocks.subtree_end_T, lists.order, lists.group_ends]
    if blocks.window_end_T is None:
        return {"mask_mod": _on_path, "aux_tensors": tensors}
    return {"mask_mod": _in_window, "aux_tensors": [*tensors, blocks.position_T, blocks.window_end_T]}


def _sparse(lists: BlockLists) -> BlockSparseTensorsTorch:
    """Lists as the kernels take them: one batch entry, all heads alike."""
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count[None, None],
        mask_block_idx=lists.partial_index[None, None],
        full_block_cnt=lists.full_count[None, None],
        full_block_idx=lists.full_index[None, None],
        block_size=lists.block_size,
    )
