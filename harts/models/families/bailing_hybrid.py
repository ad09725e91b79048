"""Ling 3.0: Kimi Delta Attention with a bounded gate, gated multi-head latent attention, and mixtures of experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf

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


class TreeBailingHybridDeltaAttention(hf.BailingHybridDeltaAttention):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        hidden_TD = hidden_states[0]
        gate_THV = self.g_proj(hidden_TD).unflatten(-1, (-1, self.head_dim))
        norm = GatedNorm(module=self.o_norm, gate_THV=gate_THV, rounded=False)
        return self.o_proj(tree_kimi_delta_attention(self, hidden_TD, harts_layout, norm).flatten(-2))[None]

    def decay_gate(self, hidden_TD: Tensor) -> DecayGate:
        """Of `BailingHybridForgetGate`."""
        gate = self.forget_gate
        return DecayGate(
            projected_TD=gate.f_proj(hidden_TD),
            log_rate_H=gate.A_log,
            bias_D=gate.dt_bias,
            lower_bound=gate.lower_bound if gate.safe_gate else None,
            dtype=hidden_TD.dtype,
        )


FAMILY = Family(
    causal_lm=hf.BailingHybridForCausalLM,
    layer_kinds=("Kimi Delta Attention (bounded gate)", "MLA (output gate)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.BailingHybridDeltaAttention: TreeBailingHybridDeltaAttention},
    attention_classes=frozenset({hf.BailingHybridAttention}),
    token_wise_classes=frozenset(
        {
            hf.BailingHybridModel,
            hf.BailingHybridDecoderLayer,
            hf.BailingHybridForgetGate,
            hf.BailingHybridMLP,
            hf.BailingHybridMoE,
            hf.BailingHybridTopkRouter,
            hf.BailingHybridExperts,
            hf.BailingHybridRMSNorm,
            hf.BailingHybridRMSNormGated,
            hf.BailingHybridRotaryEmbedding,
        }
    ),
    routers={"BailingHybridTopkRouter": GROUPED_SIGMOID},
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=kimi_delta_mixers,
    tiny={
        **TINY,
        **TINY_LATENT_ATTENTION,
        **TINY_ROUTED_EXPERTS,
        **TINY_KIMI_DELTA,
        # Of the delta attention: the configuration sets that of rotary embeddings itself.
        "head_dim": 8,
    },
    active_experts=lambda config: config.num_experts_per_tok / config.num_local_experts,
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
