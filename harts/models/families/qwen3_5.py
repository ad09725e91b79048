"""Qwen3.5 (text, dense): Gated DeltaNet and gated full attention with partial, multi-axis rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from harts.layers.linear_attention.gated_delta_net import GatedDeltaNetLayer, tree_gated_delta_net
from harts.layers.linear_attention.inputs import GatedNorm, GatedNormModule
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, TINY_GATED_DELTA_NET, Family, gated_delta_net_mixers


class Qwen3_5Layer(GatedDeltaNetLayer, Protocol):  # noqa: N801 - transformers' name
    """What is read of the layer; that of the model with experts is another class with the same parts."""

    in_proj_qkv: nn.Linear
    in_proj_a: nn.Linear
    in_proj_b: nn.Linear
    in_proj_z: nn.Linear
    out_proj: nn.Linear

    @property
    def norm(self) -> GatedNormModule:
        """The gated norm, a class of the family."""
        ...


def gated_delta_net_on_layout(layer: Qwen3_5Layer, hidden_TD: Tensor, layout: PackedLayout) -> Tensor:
    """[T, D] to [T, D]."""
    gate_THV = layer.in_proj_z(hidden_TD).unflatten(-1, (-1, layer.head_v_dim))
    norm = GatedNorm(module=layer.norm, gate_THV=gate_THV, rounded=True)
    output_THV = tree_gated_delta_net(
        layer, layer.in_proj_qkv(hidden_TD), layer.in_proj_a(hidden_TD), layer.in_proj_b(hidden_TD), layout, norm
    )
    return layer.out_proj(output_THV.flatten(-2))


class TreeQwen3_5GatedDeltaNet(hf.Qwen3_5GatedDeltaNet):  # noqa: N801 - transformers' name with a prefix
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        return gated_delta_net_on_layout(self, hidden_states[0], harts_layout)[None]


TINY_MROPE: Mapping[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
}
FAMILY = Family(
    causal_lm=hf.Qwen3_5ForCausalLM,
    layer_kinds=("Gated DeltaNet", "attention (output gate, partial mRoPE)"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.Qwen3_5GatedDeltaNet: TreeQwen3_5GatedDeltaNet},
    attention_classes=frozenset({hf.Qwen3_5Attention}),
    token_wise_classes=frozenset(
        {
            hf.Qwen3_5TextModel,
            hf.Qwen3_5DecoderLayer,
            hf.Qwen3_5MLP,
            hf.Qwen3_5RMSNorm,
            hf.Qwen3_5RMSNormGated,
            hf.Qwen3_5TextRotaryEmbedding,
        }
    ),
    layout_needs=lambda config: LayoutNeeds(chunk_size=64, conv_width=config.linear_conv_kernel_dim),
    mixers=gated_delta_net_mixers,
    tiny={**TINY, **TINY_GATED_DELTA_NET, **TINY_MROPE},
    # The activation after the short convolution is the MLP's.
    required={"attention_dropout": 0.0, "hidden_act": "silu"},
)
