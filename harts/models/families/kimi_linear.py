"""Kimi Linear: Kimi Delta Attention, multi-head latent attention without positions, and mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as hf

from harts.layers.linear_attention.inputs import DecayGate, GatedNorm
from harts.layers.linear_attention.kimi_delta import tree_kimi_delta_attention
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import (
    TINY,
    TINY_KIMI_DELTA,
    TINY_LATENT_ATTENTION,
    TINY_ROUTED_EXPERTS,
    Family,
    kimi_delta_mixers,
)
from harts.models.routers import GROUPED_SIGMOID


class TreeKimiLinearDeltaAttention(hf.KimiLinearDeltaAttention):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        hidden_TD = hidden_states[0]
        gate_THV = self.g_b_proj(self.g_a_proj(hidden_TD)).unflatten(-1, (-1, self.head_dim))
        norm = GatedNorm(module=self.o_norm, gate_THV=gate_THV, rounded=False)
        return self.o_proj(tree_kimi_delta_attention(self, hidden_TD, harts_layout, norm).flatten(-2))[None]

    def decay_gate(self, hidden_TD: Tensor) -> DecayGate:
        """Of `KimiLinearForgetGate`."""
        gate = self.forget_gate
        return DecayGate(
            projected_TD=gate.f_b_proj(gate.f_a_proj(hidden_TD)),
            log_rate_H=gate.A_log.flatten(),
            bias_D=gate.dt_bias,
            lower_bound=None,
            dtype=torch.float32,
        )


FAMILY = Family(
    causal_lm=hf.KimiLinearForCausalLM,
    layer_kinds=("Kimi Delta Attention", "MLA (NoPE)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.KimiLinearDeltaAttention: TreeKimiLinearDeltaAttention},
    attention_classes=frozenset({hf.KimiLinearAttention}),
    token_wise_classes=frozenset(
        {
            hf.KimiLinearModel,
            hf.KimiLinearDecoderLayer,
            hf.KimiLinearForgetGate,
            hf.KimiLinearMLP,
            hf.KimiLinearMoE,
            hf.KimiLinearTopkRouter,
            hf.KimiLinearExperts,
            hf.KimiLinearRMSNorm,
            hf.KimiLinearRMSNormGated,
        }
    ),
    routers={"KimiLinearTopkRouter": GROUPED_SIGMOID},
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=kimi_delta_mixers,
    tiny={
        **TINY,
        **TINY_LATENT_ATTENTION,
        **TINY_ROUTED_EXPERTS,
        **TINY_KIMI_DELTA,
        "linear_num_heads": 3,
        "linear_head_dim": 8,
    },
    active_experts=lambda config: config.num_experts_per_tok / config.num_local_experts,
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
