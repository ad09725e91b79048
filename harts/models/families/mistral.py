"""Mistral: attention to all tokens before or, with a window, to the nearest ones in every layer."""

from __future__ import annotations

from transformers import PreTrainedConfig
from transformers.models.mistral import modeling_mistral as hf

from harts.models.family import TINY, Family, Mixers, head_width


def _mixers(config: PreTrainedConfig) -> Mixers:
    layers, window = config.num_hidden_layers, config.sliding_window
    return Mixers(
        num_full_attention_layers=layers if window is None else 0,
        windows=() if window is None else (window,) * layers,
        attention_width=config.num_attention_heads * head_width(config),
    )


FAMILY = Family(
    causal_lm=hf.MistralForCausalLM,
    layer_kinds=("attention (sliding window)",),
    layer_types=frozenset(),
    attention_classes=frozenset({hf.MistralAttention}),
    token_wise_classes=frozenset(
        {hf.MistralModel, hf.MistralDecoderLayer, hf.MistralMLP, hf.MistralRMSNorm, hf.MistralRotaryEmbedding}
    ),
    mixers=_mixers,
    tiny={**TINY, "sliding_window": 20},
)
