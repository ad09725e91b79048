"""DeepSeek-V3: multi-head latent attention, and mixtures of experts behind a sigmoid router with groups."""

from __future__ import annotations

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf

from harts.models.family import TINY, TINY_LATENT_ATTENTION, TINY_ROUTED_EXPERTS, Family, latent_attention_mixers
from harts.models.routers import GROUPED_SIGMOID

FAMILY = Family(
    causal_lm=hf.DeepseekV3ForCausalLM,
    layer_kinds=("MLA", "MoE"),
    layer_types=frozenset({"full_attention"}),
    attention_classes=frozenset({hf.DeepseekV3Attention}),
    token_wise_classes=frozenset(
        {
            hf.DeepseekV3Model,
            hf.DeepseekV3DecoderLayer,
            hf.DeepseekV3MLP,
            hf.DeepseekV3MoE,
            hf.DeepseekV3TopkRouter,
            hf.DeepseekV3Experts,
            hf.DeepseekV3RMSNorm,
            hf.DeepseekV3RotaryEmbedding,
        }
    ),
    routers={"DeepseekV3TopkRouter": GROUPED_SIGMOID},
    mixers=latent_attention_mixers,
    tiny={
        **TINY,
        **TINY_LATENT_ATTENTION,
        **TINY_ROUTED_EXPERTS,
        "q_lora_rank": 12,
        "n_routed_experts": 6,
        "first_k_dense_replace": 1,
    },
    active_experts=lambda config: config.num_experts_per_tok / config.num_local_experts,
)
