"""Gemma 3 (text): sliding windows with local rotary positions between layers of full attention with global ones."""

from __future__ import annotations

from transformers.models.gemma3 import modeling_gemma3 as hf

from harts.models.family import TINY, TINY_WINDOWS, Family, attention_mixers

FAMILY = Family(
    causal_lm=hf.Gemma3ForCausalLM,
    layer_kinds=("attention (query and key norms)", "attention (sliding window)"),
    layer_types=frozenset({"full_attention", "sliding_attention"}),
    attention_classes=frozenset({hf.Gemma3Attention}),
    token_wise_classes=frozenset(
        {
            hf.Gemma3TextModel,
            hf.Gemma3TextScaledWordEmbedding,
            hf.Gemma3DecoderLayer,
            hf.Gemma3MLP,
            hf.Gemma3RMSNorm,
            hf.Gemma3RotaryEmbedding,
        }
    ),
    mixers=attention_mixers,
    tiny={**TINY, **TINY_WINDOWS, "query_pre_attn_scalar": 12, "tie_word_embeddings": False},
    required={
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
)
