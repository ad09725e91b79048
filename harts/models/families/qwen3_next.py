"""Qwen3-Next: Gated DeltaNet and gated full attention, with mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as hf

from harts.layers.linear_attention.gated_delta_net import tree_gated_delta_net
from harts.layers.linear_attention.inputs import GatedNorm
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, TINY_EXPERTS, TINY_GATED_DELTA_NET, Family, gated_delta_net_mixers
from harts.models.routers import SOFTMAX_BY_SETTING


class TreeQwen3NextGatedDeltaNet(hf.Qwen3NextGatedDeltaNet):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        query, key, value, gate, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        mixed_TD = torch.cat([x[0].flatten(-2) for x in (query, key, value)], dim=-1)
        norm = GatedNorm(module=self.norm, gate_THV=gate[0], rounded=True)
        output_THV = tree_gated_delta_net(self, mixed_TD, a[0], b[0], harts_layout, norm)
        return self.out_proj(output_THV.flatten(-2))[None]


FAMILY = Family(
    causal_lm=hf.Qwen3NextForCausalLM,
    layer_kinds=("Gated DeltaNet", "attention (output gate, partial RoPE)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.Qwen3NextGatedDeltaNet: TreeQwen3NextGatedDeltaNet},
    attention_classes=frozenset({hf.Qwen3NextAttention}),
    token_wise_classes=frozenset(
        {
            hf.Qwen3NextModel,
            hf.Qwen3NextDecoderLayer,
            hf.Qwen3NextMLP,
            hf.Qwen3NextSparseMoeBlock,
            hf.Qwen3NextTopKRouter,
            hf.Qwen3NextExperts,
            hf.Qwen3NextRMSNorm,
            hf.Qwen3NextRMSNormGated,
            hf.Qwen3NextRotaryEmbedding,
        }
    ),
    routers={"Qwen3NextTopKRouter": SOFTMAX_BY_SETTING},
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=gated_delta_net_mixers,
    tiny={**TINY, **TINY_GATED_DELTA_NET, **TINY_EXPERTS},
    active_experts=lambda config: config.num_experts_per_tok / config.num_experts,
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
