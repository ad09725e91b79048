"""Bamba: Mamba2 and full attention with partial rotary positions."""

from __future__ import annotations

from transformers.models.bamba import modeling_bamba as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, Family, Mixers
from harts.models.shared_layers import TreeMamba2


class TreeBambaMixer(TreeMamba2, hf.BambaMixer):
    """On a layout, too."""


FAMILY = Family(
    causal_lm=hf.BambaForCausalLM,
    layer_kinds=("Mamba2", "attention (partial RoPE)"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.BambaMixer: TreeBambaMixer},
    attention_classes=frozenset({hf.BambaAttention}),
    token_wise_classes=frozenset(
        {
            hf.BambaModel,
            hf.BambaDecoderLayer,
            hf.BambaMLP,
            hf.BambaRMSNorm,
            hf.BambaRMSNormGated,
            hf.BambaRotaryEmbedding,
        }
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.mamba_chunk_size, conv_width=config.mamba_d_conv),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.layer_types.count("full_attention"),
        attention_width=config.hidden_size,
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.mamba_n_heads,
        linear_key_dim=config.mamba_d_state,
        linear_value_dim=config.mamba_d_head,
    ),
    tiny={
        **TINY,
        "head_dim": 8,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 64,
        # Both limits are reached, by some tokens.
        "time_step_limit": (1.0, 1.6),
    },
)
