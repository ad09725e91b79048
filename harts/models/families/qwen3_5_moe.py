"""Qwen3.5 (text) with mixtures of experts; its other layers are those of the dense model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.families.qwen3_5 import TINY_MROPE, gated_delta_net_on_layout
from harts.models.family import TINY, TINY_EXPERTS, TINY_GATED_DELTA_NET, Family, gated_delta_net_mixers
from harts.models.routers import SOFTMAX


class TreeQwen3_5MoeGatedDeltaNet(hf.Qwen3_5MoeGatedDeltaNet):  # noqa: N801 - transformers' name with a prefix
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        return gated_delta_net_on_layout(self, hidden_states[0], harts_layout)[None]


FAMILY = Family(
    causal_lm=hf.Qwen3_5MoeForCausalLM,
    layer_kinds=("Gated DeltaNet", "attention (output gate, partial mRoPE)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.Qwen3_5MoeGatedDeltaNet: TreeQwen3_5MoeGatedDeltaNet},
    attention_classes=frozenset({hf.Qwen3_5MoeAttention}),
    token_wise_classes=frozenset(
        {
            hf.Qwen3_5MoeTextModel,
            hf.Qwen3_5MoeDecoderLayer,
            hf.Qwen3_5MoeMLP,
            hf.Qwen3_5MoeSparseMoeBlock,
            hf.Qwen3_5MoeTopKRouter,
            hf.Qwen3_5MoeExperts,
            hf.Qwen3_5MoeRMSNorm,
            hf.Qwen3_5MoeRMSNormGated,
            hf.Qwen3_5MoeTextRotaryEmbedding,
        }
    ),
    routers={"Qwen3_5MoeTopKRouter": SOFTMAX},
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=gated_delta_net_mixers,
    tiny={**TINY, **TINY_GATED_DELTA_NET, **TINY_EXPERTS, **TINY_MROPE},
    active_experts=lambda config: config.num_experts_per_tok / config.num_experts,
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
