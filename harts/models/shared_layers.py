"""Tree classes of layers that transformers copies from family to family, to be mixed into each copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harts.layers.linear_attention.mamba2 import normed_mamba2
from harts.layers.short_conv.gated import tree_gated_short_conv
from harts.layout.packed import PackedLayout


class TreeMamba2:
    """A Mamba2 mixer with a gated norm on a layout; without one, transformers' own."""

    def forward(
        self: Any, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)  # type: ignore[misc]
        return self.out_proj(normed_mamba2(self, self.norm, self.in_proj(hidden_states[0]), harts_layout))[None]


class TreeShortConv:
    """A gated short convolution on a layout; without one, transformers' own."""

    def forward(
        self: Any, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)  # type: ignore[misc]
        return tree_gated_short_conv(self, hidden_states[0], harts_layout)[None]


class TreeShortConvDecoderLayer:
    """Hands the layout to the convolution, which transformers before 5.24 does not."""

    def forward(
        self: Any, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)  # type: ignore[misc]
        if self.is_attention_layer:
            return super().forward(hidden_states, *args, harts_layout=harts_layout, **options)  # type: ignore[misc]
        hidden_states = hidden_states + self.conv(self.operator_norm(hidden_states), harts_layout=harts_layout)
        return hidden_states + self.feed_forward(self.ffn_norm(hidden_states))
