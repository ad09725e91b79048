"""LFM2 with mixtures of experts: gated short convolutions between layers of full attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.lfm2_moe import modeling_lfm2_moe as hf

from harts.layers.short_conv.gated import tree_gated_short_conv
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, TINY_EXPERTS, TINY_SHORT_CONVOLUTIONS, Family, attention_mixers
from harts.models.routers import BIASED_SIGMOID


class TreeLfm2MoeShortConv(hf.Lfm2MoeShortConv):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        return tree_gated_short_conv(self, hidden_states[0], harts_layout)[None]


class TreeLfm2MoeDecoderLayer(hf.Lfm2MoeDecoderLayer):
    """Hands the layout to the convolution, which transformers before 5.24 does not."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        if self.is_attention_layer:
            return super().forward(hidden_states, *args, harts_layout=harts_layout, **options)
        hidden_states = hidden_states + self.conv(self.operator_norm(hidden_states), harts_layout=harts_layout)
        return hidden_states + self.feed_forward(self.ffn_norm(hidden_states))


FAMILY = Family(
    causal_lm=hf.Lfm2MoeForCausalLM,
    layer_kinds=("gated short convolution", "attention (query and key norms)", "MoE"),
    layer_types=frozenset({"full_attention", "conv"}),
    tree_classes={hf.Lfm2MoeShortConv: TreeLfm2MoeShortConv, hf.Lfm2MoeDecoderLayer: TreeLfm2MoeDecoderLayer},
    attention_classes=frozenset({hf.Lfm2MoeAttention}),
    token_wise_classes=frozenset(
        {
            hf.Lfm2MoeModel,
            hf.Lfm2MoeMLP,
            hf.Lfm2MoeSparseMoeBlock,
            hf.Lfm2MoeTopKRouter,
            hf.Lfm2MoeExperts,
            hf.Lfm2MoeRMSNorm,
            hf.Lfm2MoeRotaryEmbedding,
        }
    ),
    routers={"Lfm2MoeTopKRouter": BIASED_SIGMOID},
    layout_needs=lambda config: LayoutNeeds(chunk_size=None, conv_width=config.conv_L_cache),
    mixers=attention_mixers,
    tiny={**TINY, **TINY_SHORT_CONVOLUTIONS, **TINY_EXPERTS, "num_dense_layers": 1},
    active_experts=lambda config: config.num_experts_per_tok / config.num_experts,
    required={},
)
