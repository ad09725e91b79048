"""The gated short convolution of LFM2 along tree paths: nothing else mixes tokens in such a layer."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from harts.layers.short_conv.packed import packed_short_conv
from harts.layout.packed import PackedLayout


class GatedShortConvLayer(Protocol):
    """What is read of a transformers layer, whatever its family."""

    conv: nn.Conv1d
    in_proj: nn.Linear
    out_proj: nn.Linear


def tree_gated_short_conv(layer: GatedShortConvLayer, hidden_TD: Tensor, layout: PackedLayout) -> Tensor:
    """`out_proj(C * conv(B * x))` with `B, C, x = in_proj(hidden)`, the convolution along every path.

    Args:
        layer: A transformers gated short convolution; its convolution and projections are used.
        hidden_TD: [T, D].
        layout: Of the T tokens.

    Returns:
        [T, D].
    """
    before_TD, after_TD, x_TD = layer.in_proj(hidden_TD).chunk(3, dim=-1)
    convolution = layer.conv
    convolved_TD = packed_short_conv(before_TD * x_TD, convolution.weight.squeeze(1), convolution.bias, layout)
    return layer.out_proj(after_TD * convolved_TD)
