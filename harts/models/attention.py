"""Tree attention behind transformers' attention interface.

With a layout among the keyword arguments of the model's forward, attention follows the tree; without one the same
model attends exactly as it does under `sdpa`, so that one prepared model serves generation and both executions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from harts.layers.tree_attention.sdpa import tree_attention
from harts.layout.packed import PackedLayout

ATTENTION_NAME = "harts_tree"


def harts_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    harts_layout: PackedLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: [batch, heads, tokens, width] in, [batch, tokens, heads, V] out."""
    if harts_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    assert query.shape[0] == 1, "a layout is one packed row"
    output = tree_attention(
        query[0],
        key[0],
        value[0],
        layout=harts_layout,
        scale=options["scaling"],
        window=options.get("sliding_window"),  # layers of families without windows do not name it
    )
    return output.transpose(0, 1)[None], None


AttentionInterface.register(ATTENTION_NAME, harts_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
