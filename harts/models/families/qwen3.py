"""Qwen3: full attention, with sliding windows in layers of that type."""

from __future__ import annotations

from transformers.models.qwen3 import modeling_qwen3 as hf

from harts.models.family import TINY, TINY_WINDOWS, Family, attention_mixers

FAMILY = Family(
    causal_lm=hf.Qwen3ForCausalLM,
    layer_kinds=("attention", "attention (sliding window)"),
    layer_types=frozenset({"full_attention", "sliding_attention"}),
    attention_classes=frozenset({hf.Qwen3Attention}),
    token_wise_classes=frozenset(
        {hf.Qwen3Model, hf.Qwen3DecoderLayer, hf.Qwen3MLP, hf.Qwen3RMSNorm, hf.Qwen3RotaryEmbedding}
    ),
    mixers=attention_mixers,
    tiny={**TINY, **TINY_WINDOWS},
)
