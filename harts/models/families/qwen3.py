"""Qwen3: full attention only."""

from __future__ import annotations

from transformers.models.qwen3 import modeling_qwen3 as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import Family

FAMILY = Family(
    causal_lm=hf.Qwen3ForCausalLM,
    layer_types=frozenset({"full_attention"}),
    tree_classes={},
    attention_classes=frozenset({hf.Qwen3Attention}),
    token_wise_classes=frozenset(
        {hf.Qwen3Model, hf.Qwen3DecoderLayer, hf.Qwen3MLP, hf.Qwen3RMSNorm, hf.Qwen3RotaryEmbedding}
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=None, conv_width=1),
)
