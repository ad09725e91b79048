"""Qwen2 and Qwen2.5: full attention, with sliding windows in layers of that type."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2 as hf

from harts.models.family import TINY, TINY_WINDOWS, Family, attention_mixers

FAMILY = Family(
    causal_lm=hf.Qwen2ForCausalLM,
    layer_kinds=("attention", "attention (sliding window)"),
    layer_types=frozenset({"full_attention", "sliding_attention"}),
    attention_classes=frozenset({hf.Qwen2Attention}),
    token_wise_classes=frozenset(
        {hf.Qwen2Model, hf.Qwen2DecoderLayer, hf.Qwen2MLP, hf.Qwen2RMSNorm, hf.Qwen2RotaryEmbedding}
    ),
    mixers=attention_mixers,
    tiny={**TINY, **TINY_WINDOWS},
)
