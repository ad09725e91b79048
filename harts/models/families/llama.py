"""Llama: full attention only."""

from __future__ import annotations

from transformers.models.llama import modeling_llama as hf

from harts.models.family import TINY, Family, attention_mixers

FAMILY = Family(
    causal_lm=hf.LlamaForCausalLM,
    layer_kinds=("attention",),
    layer_types=frozenset(),
    attention_classes=frozenset({hf.LlamaAttention}),
    token_wise_classes=frozenset(
        {hf.LlamaModel, hf.LlamaDecoderLayer, hf.LlamaMLP, hf.LlamaRMSNorm, hf.LlamaRotaryEmbedding}
    ),
    mixers=attention_mixers,
    tiny=TINY,
)
