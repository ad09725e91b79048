"""Granite 4 hybrid: Mamba2 and full attention with or without rotary positions, experts beside a shared MLP."""

from __future__ import annotations

from transformers.models.granitemoehybrid import modeling_granitemoehybrid as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, Family, Mixers
from harts.models.routers import CHOSEN_SOFTMAX
from harts.models.shared_layers import TreeMamba2


class TreeGraniteMoeHybridMambaLayer(TreeMamba2, hf.GraniteMoeHybridMambaLayer):
    """On a layout, too."""


FAMILY = Family(
    causal_lm=hf.GraniteMoeHybridForCausalLM,
    layer_kinds=("Mamba2", "attention (RoPE or no positions)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.GraniteMoeHybridMambaLayer: TreeGraniteMoeHybridMambaLayer},
    attention_classes=frozenset({hf.GraniteMoeHybridAttention}),
    token_wise_classes=frozenset(
        {
            hf.GraniteMoeHybridModel,
            hf.GraniteMoeHybridDecoderLayer,
            hf.GraniteMoeHybridMLP,
            hf.GraniteMoeHybridMoE,
            hf.GraniteMoeHybridTopKRouter,
            hf.GraniteMoeHybridExperts,
            hf.GraniteMoeHybridRMSNorm,
            hf.GraniteMoeHybridRMSNormGated,
            hf.GraniteMoeHybridRotaryEmbedding,
        }
    ),
    routers={"GraniteMoeHybridTopKRouter": CHOSEN_SOFTMAX},
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.mamba_chunk_size, conv_width=config.mamba_d_conv),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.layer_types.count("full_attention"),
        attention_width=config.hidden_size,
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.mamba_n_heads,
        linear_key_dim=config.mamba_d_state,
        linear_value_dim=config.mamba_d_head,
    ),
    active_experts=lambda config: (
        config.num_experts_per_tok / config.num_local_experts if config.num_local_experts else 1.0
    ),
    logit_scale=lambda config: 1.0 / config.logits_scaling,
    tiny={
        **TINY,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 64,
        "intermediate_size": 16,
        "shared_intermediate_size": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.7,
        # One by one: the grouped kernels of transformers know no float64.
        "experts_implementation": "eager",
    },
)
