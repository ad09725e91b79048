"""Bamba: Mamba2 and full attention with partial rotary positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bamba import modeling_bamba as hf

from harts.layers.linear_attention.mamba2 import tree_mamba2
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, Family, Mixers


class TreeBambaMixer(hf.BambaMixer):
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
