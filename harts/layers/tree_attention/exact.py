"""Tree attention whose bits are those of each trajectory alone, for checking.

The bits of a softmax depend on where its tiles of keys begin. Here every path's keys are copied one after the other
and go through the plain causal kernel, so tiles begin at the path's first token as they do for a trajectory alone.
Costs the memory of all paths' keys and values.
"""

# Installed with the `gpu` extra only.
# pyright: reportMissingImports=false

from __future__ import annotations

from flash_attn.cute.interface import flash_attn_varlen_func
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layout.attention_paths import AttentionPaths


def tree_attention_exact(
    query_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    *,
    paths: AttentionPaths,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every packed token over its path.

    Args:
        query_HTK: [query heads, T, K] bfloat16 or float16 on a GPU that FlashAttention-4 runs on.
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads.
        paths: Of the same T tokens.
        scale: Multiplies the scores.
        window: Positions of the path that a query sees, its own included; None for all.
        sink_H: [query heads]. Score of an attention sink, as in `sdpa.tree_attention`; None for no sink.

    Returns:
        [query heads, T, V], a view of a [T, heads, V] tensor. Equals `causal_attention` on each path alone bit for
        bit. Gradients of keys and values are added over paths in float32.
    """
    query, key, value = (x.transpose(0, 1) for x in (query_HTK, key_HTK, value_HTV))
    output, _ = flash_attn_varlen_func(
        query,
        gather_rows(key, paths.key_index),
        gather_rows(value, paths.key_index),
        cu_seqlens_q=paths.query_ends,
        cu_seqlens_k=paths.key_ends,
        max_seqlen_q=paths.most_queries,
        max_seqlen_k=paths.most_keys,
        softmax_scale=scale,
        # Fewer queries than keys are the last ones.
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
        learnable_sink=None if sink_H is None else sink_H.float(),
    )
    return output.transpose(0, 1)
