"""Tree attention whose bits are those of each trajectory alone, on any device, for checking.

Every path is cut into tiles of queries at multiples of `TILE` from its first token, and a tile sees all tiles of keys
before it. A tile's shapes then follow from its position alone, so the library computes the same query with the same
kernel whatever else there is. Tokens of a tile that belong to another path too are computed again and dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layers.tree_attention.sdpa import attend
from harts.layout.attention_paths import AttentionPaths

TILE = 64
"""Queries of a tile."""


def tree_attention_by_paths(
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
        query_HTK: [query heads, T, K].
        key_HTK, value_HTV: [key heads, T, K or V]; query heads are a multiple of key heads.
        paths: Of the same T tokens.
        scale: Multiplies the scores.
        window: Positions of the path that a query sees, its own included; None for all.
        sink_H: [query heads]. Score of an attention sink, as in `sdpa.tree_attention`; None for no sink.

    Returns:
        [query heads, T, V]. Bit-equal to the same function of each path alone.
    """
    groups, num_tokens = query_HTK.shape[0] // key_HTK.shape[0], query_HTK.shape[1]
    streams = [x.transpose(0, 1) for x in (query_HTK, key_HTK, value_HTV)]
    # Widened here, so that what the tiles add to its gradient is added in float32.
    sinks = () if sink_H is None else (sink_H.to(torch.promote_types(sink_H.dtype, torch.float32)),)
    query_ends, key_ends = paths.query_ends.tolist(), paths.key_ends.tolist()
    outputs = []
    for path in range(len(key_ends) - 1):
        index = paths.key_index[key_ends[path] : key_ends[path + 1]]
        length = index.numel()
        first = length - (query_ends[path + 1] - query_ends[path])
        index = torch.cat([index, index.new_full((-length % TILE,), num_tokens)])  # rows of zeros
        query, key, value = (gather_rows(x, index).transpose(0, 1) for x in streams)
        key, value = key.repeat_interleave(groups, dim=0), value.repeat_interleave(groups, dim=0)
        for begin in range(first // TILE * TILE, length, TILE):
            end = begin + TILE
            keys = slice(0 if window is None else max(0, begin - window + 1) // TILE * TILE, end)
            inputs = (query[:, begin:end], key[:, keys], value[:, keys], *sinks)
            output = attend(inputs, _mask(begin, keys, window, index.device), scale)
            outputs.append(output[:, max(first - begin, 0) : length - begin])
    return torch.cat(outputs, dim=1)


def _mask(begin: int, keys: slice, window: int | None, device: torch.device) -> Tensor:
    query = torch.arange(begin, begin + TILE, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    return key <= query if window is None else (key <= query) & (query - key < window)
