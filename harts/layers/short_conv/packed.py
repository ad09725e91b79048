"""Short convolution of packed tokens, by the kernel that fits."""

from __future__ import annotations

from torch import Tensor

from harts.layers.capability import takes_triton
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layout.packed import PackedLayout


def packed_short_conv(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, layout: PackedLayout) -> Tensor:
    """`tree_short_conv` of a layout's tokens: in 16 bits on a GPU in one launch, if Triton is installed."""
    asked_for_pytorch = layout.needs.kernels.linear_attention == "torch"
    if asked_for_pytorch or not takes_triton(x_TD) or weight_DJ.shape[1] < 2:
        return tree_short_conv(x_TD, weight_DJ, bias_D, layout.ancestors_JT)
    from harts.layers.short_conv.kernel import tree_short_conv_rows

    widths = (weight_DJ.shape[0],)
    index = layout.indices.conv()
    return tree_short_conv_rows(x_TD, weight_DJ, bias_D, index=index, widths=widths, activation="none")[0]
