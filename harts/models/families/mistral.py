"""Mistral: full attention only."""

from __future__ import annotations

from transformers.models.mistral import modeling_mistral as hf

from harts.models.family import TINY, Family, attention_mixers

FAMILY = Family(
    causal_lm=hf.MistralForCausalLM,
    layer_kinds=("attention",),
    layer_types=frozenset(),
    attention_classes=frozenset({hf.MistralAttention}),
    token_wise_classes=frozenset(
        {hf.MistralModel, hf.MistralDecoderLayer, hf.MistralMLP, hf.MistralRMSNorm, hf.MistralRotaryEmbedding}
    ),
    required={"attention_dropout": 0.0, "sliding_window": None},
    mixers=attention_mixers,
    tiny={**TINY, "sliding_window": None},
)
