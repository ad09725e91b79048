"""Zamba2: Mamba2 layers, some of them after one of a few full-attention blocks that share weights and not adapters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.zamba2 import modeling_zamba2 as hf

from harts.layers.linear_attention.mamba2 import tree_mamba2
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, Family, Mixers


class TreeZamba2MambaMixer(hf.Zamba2MambaMixer):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        output_TD, gate_TD = tree_mamba2(self, self.in_proj(hidden_states[0]), harts_layout)
        return self.out_proj(self.norm(output_TD, gate_TD).to(hidden_states.dtype))[None]


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
