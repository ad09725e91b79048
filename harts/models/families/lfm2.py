"""LFM2: gated short convolutions between layers of full attention."""

from __future__ import annotations

from transformers.models.lfm2 import modeling_lfm2 as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, TINY_SHORT_CONVOLUTIONS, Family, attention_mixers
from harts.models.shared_layers import TreeShortConv, TreeShortConvDecoderLayer


class TreeLfm2ShortConv(TreeShortConv, hf.Lfm2ShortConv):
    """On a layout, too."""


class TreeLfm2DecoderLayer(TreeShortConvDecoderLayer, hf.Lfm2DecoderLayer):
    """On a layout, too."""


FAMILY = Family(
    causal_lm=hf.Lfm2ForCausalLM,
    layer_kinds=("gated short convolution", "attention (query and key norms)"),
    layer_types=frozenset({"full_attention", "conv"}),
    tree_classes={hf.Lfm2ShortConv: TreeLfm2ShortConv, hf.Lfm2DecoderLayer: TreeLfm2DecoderLayer},
    attention_classes=frozenset({hf.Lfm2Attention}),
    token_wise_classes=frozenset({hf.Lfm2Model, hf.Lfm2MLP, hf.Lfm2RMSNorm, hf.Lfm2RotaryEmbedding}),
    layout_needs=lambda config: LayoutNeeds(chunk_size=None, conv_width=config.conv_L_cache),
    mixers=attention_mixers,
    tiny={**TINY, **TINY_SHORT_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    required={},
)
