"""LFM2 with mixtures of experts: gated short convolutions between layers of full attention."""

from __future__ import annotations

from transformers.models.lfm2_moe import modeling_lfm2_moe as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, TINY_EXPERTS, TINY_SHORT_CONVOLUTIONS, Family, attention_mixers
from harts.models.routers import BIASED_SIGMOID
from harts.models.shared_layers import TreeShortConv, TreeShortConvDecoderLayer


class TreeLfm2MoeShortConv(TreeShortConv, hf.Lfm2MoeShortConv):
    """On a layout, too."""


class TreeLfm2MoeDecoderLayer(TreeShortConvDecoderLayer, hf.Lfm2MoeDecoderLayer):
    """On a layout, too."""


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
