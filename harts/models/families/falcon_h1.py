"""Falcon-H1: Mamba2 and full attention side by side in every layer, with fixed multipliers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1 as hf

from harts.layers.linear_attention.mamba2 import tree_mamba2
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, Family, Mixers


class TreeFalconH1Mixer(hf.FalconH1Mixer):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        assert self.ssm_in_multiplier is not None, "transformers' own forward needs it too"
        projected_TD = self.in_proj(hidden_states[0] * self.ssm_in_multiplier) * self.get_buffer("mup_vector")[0, 0]
        output_TD, gate_TD = tree_mamba2(self, projected_TD, harts_layout)
        output_TD = self.norm(output_TD, gate_TD) if self.mamba_rms_norm else output_TD * F.silu(gate_TD)
        return self.out_proj(output_TD.to(hidden_states.dtype))[None]


FAMILY = Family(
    causal_lm=hf.FalconH1ForCausalLM,
    layer_kinds=("Mamba2 beside attention",),
    layer_types=frozenset({"hybrid"}),
    tree_classes={hf.FalconH1Mixer: TreeFalconH1Mixer},
    attention_classes=frozenset({hf.FalconH1Attention}),
    token_wise_classes=frozenset(
        {
            hf.FalconH1Model,
            hf.FalconH1DecoderLayer,
            hf.FalconH1MLP,
            hf.FalconH1RMSNorm,
            hf.FalconH1RMSNormGated,
            hf.FalconH1RotaryEmbedding,
        }
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.mamba_chunk_size, conv_width=config.mamba_d_conv),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.num_hidden_layers,
        attention_width=config.hidden_size,
        num_linear_layers=config.num_hidden_layers,
        linear_heads=config.mamba_n_heads,
        linear_key_dim=config.mamba_d_state,
        linear_value_dim=config.mamba_d_head,
    ),
    logit_scale=lambda config: config.lm_head_multiplier,
    tiny={
        **TINY,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_chunk_size": 64,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.7,
        "key_multiplier": 0.8,
        "mlp_multipliers": [0.9, 1.1],
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.8, 0.9, 1.1, 1.2, 1.3],
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.8,
    },
)
