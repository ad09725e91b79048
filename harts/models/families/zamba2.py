"""Zamba2: Mamba2 layers, some of them after one of a few full-attention blocks that share weights and not adapters."""

from __future__ import annotations

from transformers.models.zamba2 import modeling_zamba2 as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, Family, Mixers
from harts.models.shared_layers import TreeMamba2


class TreeZamba2MambaMixer(TreeMamba2, hf.Zamba2MambaMixer):
    """On a layout, too."""


FAMILY = Family(
    causal_lm=hf.Zamba2ForCausalLM,
    layer_kinds=("Mamba2", "shared attention (RoPE or no positions, adapters)"),
    layer_types=frozenset({"hybrid", "linear_attention"}),
    tree_classes={hf.Zamba2MambaMixer: TreeZamba2MambaMixer},
    attention_classes=frozenset({hf.Zamba2Attention}),
    token_wise_classes=frozenset(
        {
            hf.Zamba2Model,
            hf.Zamba2AttentionDecoderLayer,
            hf.Zamba2MambaDecoderLayer,
            hf.Zamba2HybridLayer,
            hf.Zamba2MLP,
            hf.Zamba2RMSNorm,
            hf.Zamba2RMSNormGated,
            hf.Zamba2RotaryEmbedding,
        }
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.chunk_size, conv_width=config.mamba_d_conv),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.layer_types.count("hybrid"),
        attention_width=config.num_attention_heads * config.attention_head_dim,
        num_linear_layers=config.num_hidden_layers,
        linear_heads=config.n_mamba_heads,
        linear_key_dim=config.mamba_d_state,
        linear_value_dim=config.mamba_headdim,
    ),
    tiny={
        **{name: value for name, value in TINY.items() if name != "head_dim"},
        # More would make gradients in the hundreds, next to whose rounding those that cancel to zero are large.
        "initializer_range": 0.1,
        # Two shared blocks, the first of them used twice.
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        # Adapters on queries, keys and values are as wide as the attention's input.
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
        "adapter_rank": 3,
        "use_mem_rope": True,
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 64,
        # Steps of some tokens are at the limit.
        "time_step_min": 0.05,
        "time_step_max": 2.0,
        "tie_word_embeddings": False,
    },
)
