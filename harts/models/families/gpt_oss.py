"""gpt-oss: attention with a learned sink in every head, in windows and in full, and mixtures of experts."""

from __future__ import annotations

from transformers.masking_utils import eager_mask
from transformers.models.gpt_oss import modeling_gpt_oss as hf

from harts.models.attention import DenseAttention
from harts.models.family import TINY, TINY_WINDOWS, Family, attention_mixers
from harts.models.routers import CHOSEN_SOFTMAX

FAMILY = Family(
    causal_lm=hf.GptOssForCausalLM,
    layer_kinds=("attention (sinks)", "attention (sinks, sliding window)", "MoE"),
    # transformers has no SDPA path for sinks.
    attention=DenseAttention.register(
        "eager", "harts_tree_gpt_oss", forward=hf.eager_attention_forward, mask=eager_mask
    ),
    layer_types=frozenset({"full_attention", "sliding_attention"}),
    attention_classes=frozenset({hf.GptOssAttention}),
    token_wise_classes=frozenset(  # pyright: ignore[reportArgumentType] - a decorator hides that experts are a class
        {
            hf.GptOssModel,
            hf.GptOssDecoderLayer,
            hf.GptOssMLP,
            hf.GptOssTopKRouter,
            hf.GptOssExperts,
            hf.GptOssRMSNorm,
            hf.GptOssRotaryEmbedding,
        }
    ),
    routers={"GptOssTopKRouter": CHOSEN_SOFTMAX},
    mixers=attention_mixers,
    tiny={
        **TINY,
        **TINY_WINDOWS,
        "intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    active_experts=lambda config: config.num_experts_per_tok / config.num_local_experts,
)
