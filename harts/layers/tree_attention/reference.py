"""The definition: a dense ancestor mask, walked up from every token."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_attention_reference(
    query_HTK: Tensor,
    key_HTK: Tensor,
    value_HTV: Tensor,
    *,
    parent_T: Tensor,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """Attention of every token over its ancestors and itself.

    Args:
        query_HTK, key_HTK, value_HTV: [heads, T, width]; as many key heads as query heads.
        parent_T: [T] int64, -1 at a root.
        scale: Multiplies the scores.
        window: Tokens of the path that each token sees, itself included; None for all.
        sink_H: [heads]. A score beside those of the keys whose value is zero; None for no sink.

    Returns:
        [heads, T, V].
    """
    num_tokens, parents = parent_T.numel(), parent_T.tolist()
    visible_TT = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for token in range(num_tokens):
        seen, ancestor = [], token
        while ancestor >= 0 and (window is None or len(seen) < window):
            seen.append(ancestor)
            ancestor = parents[ancestor]
        visible_TT[token, seen] = True
    scores_HTT = (query_HTK @ key_HTK.transpose(-1, -2) * scale).masked_fill(~visible_TT, float("-inf"))
    if sink_H is None:
        return scores_HTT.softmax(-1) @ value_HTV
    sinks = sink_H[:, None, None].expand(-1, num_tokens, 1)
    return torch.cat([scores_HTT, sinks], dim=-1).softmax(-1)[..., :-1] @ value_HTV
