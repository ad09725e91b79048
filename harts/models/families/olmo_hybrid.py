"""OLMo Hybrid: Gated DeltaNet whose transitions may have negative eigenvalues, and full attention."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

from harts.layers.linear_attention.gated_delta_net import GatedDeltaNetLayer, tree_gated_delta_net
from harts.layers.linear_attention.inputs import GatedNorm
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, TINY_GATED_DELTA_NET, Family, gated_delta_net_mixers


class TreeOlmoHybridGatedDeltaNet(hf.OlmoHybridGatedDeltaNet):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        hidden_TD = hidden_states[0]
        gate_THV = self.g_proj(hidden_TD).unflatten(-1, (-1, self.head_v_dim))
        output_THV = tree_gated_delta_net(
            cast(GatedDeltaNetLayer, self),  # the configuration has filled in the numbers of heads
            torch.cat([self.q_proj(hidden_TD), self.k_proj(hidden_TD), self.v_proj(hidden_TD)], dim=-1),
            self.a_proj(hidden_TD),
            self.b_proj(hidden_TD),
            harts_layout,
            GatedNorm(module=self.o_norm, gate_THV=gate_THV, rounded=True),
            # A step of up to 2 reflects the state at a key where one of up to 1 can only erase it.
            max_beta=2.0 if self.allow_neg_eigval else 1.0,
        )
        return self.o_proj(output_THV.flatten(-2))[None]


FAMILY = Family(
    causal_lm=hf.OlmoHybridForCausalLM,
    layer_kinds=("Gated DeltaNet (negative eigenvalues)", "attention (NoPE or RoPE)"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.OlmoHybridGatedDeltaNet: TreeOlmoHybridGatedDeltaNet},
    attention_classes=frozenset({hf.OlmoHybridAttention}),
    token_wise_classes=frozenset(
        {
            hf.OlmoHybridModel,
            hf.OlmoHybridAttentionDecoderLayer,
            hf.OlmoHybridLinearAttentionDecoderLayer,
            hf.OlmoHybridMLP,
            hf.OlmoHybridRMSNorm,
            hf.OlmoHybridRMSNormGated,
            hf.OlmoHybridRotaryEmbedding,
        }
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=gated_delta_net_mixers,
    tiny={
        **TINY,
        **TINY_GATED_DELTA_NET,
        "pad_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
