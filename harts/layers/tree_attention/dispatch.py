"""Tree attention by the kernel that fits: chosen from the tensors a layer has, once for all layers alike."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from harts.layers.tree_attention import sdpa
from harts.layers.tree_attention.by_paths import tree_attention_by_paths
from harts.layers.tree_attention.choice import AttentionNeeds, Choice, Machine, choose_kernel
from harts.layout.packed import PackedLayout

logger = logging.getLogger(__name__)


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
    """Attention of every packed token over its path, by the kernel that `layout.needs.kernels` asks for or the fastest.

    Args and returns as of `sdpa.tree_attention`.

    Raises:
        ValueError: If the kernel asked for cannot run here; the message names the fix.
    """
    needs = AttentionNeeds(
        dtype=query_HTK.dtype,
        head_width=query_HTK.shape[-1],
        value_width=value_HTV.shape[-1],
        grouped=query_HTK.shape[0] != key_HTK.shape[0],
        deterministic=layout.needs.kernels.deterministic,
        exact=layout.needs.kernels.exact,
    )
    kernel = _choice(needs, query_HTK.device, layout.needs.kernels.attention).kernel
    if needs.exact:
        exact = _flash4_exact() if kernel == "flash4" else tree_attention_by_paths
        paths = layout.indices.attention_paths()
        return exact(query_HTK, key_HTK, value_HTV, paths=paths, scale=scale, window=window, sink_H=sink_H)
    if kernel == "sdpa":
        return sdpa.tree_attention(
            query_HTK, key_HTK, value_HTV, layout=layout, scale=scale, window=window, sink_H=sink_H
        )
    if kernel == "flex":
        from harts.layers.tree_attention import flex

        blocks = layout.indices.attention(flex.BLOCK_SIZE, flex.BLOCK_SIZE, window)
        mask = layout.indices.once(("block_mask", window), lambda: flex.block_mask(blocks))
        return flex.tree_attention_flex(query_HTK, key_HTK, value_HTV, mask=mask, scale=scale, sink_H=sink_H)
    from harts.layers.tree_attention import flash4

    tiles = flash4.tiles_for(needs.head_width, needs.value_width)
    return flash4.tree_attention_flash4(
        query_HTK,
        key_HTK,
        value_HTV,
        blocks=layout.indices.attention(tiles.forward, tiles.backward_block, window),
        scale=scale,
        sink_H=sink_H,
        deterministic=needs.deterministic,
    )


def _flash4_exact() -> Callable[..., Tensor]:
    from harts.layers.tree_attention.exact import tree_attention_exact

    return tree_attention_exact


@functools.cache
def _choice(needs: AttentionNeeds, device: torch.device, asked: str | None) -> Choice:
    choice = choose_kernel(needs, Machine.of(device), asked=asked)
    level = logging.WARNING if device.type == "cuda" and choice.kernel == "sdpa" else logging.INFO
    logger.log(level, "Tree attention runs with %s (%s)", choice.kernel, choice.reason)
    return choice
