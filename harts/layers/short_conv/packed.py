"""Short convolution of packed tokens, by the kernel that fits."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layout.packed import PackedLayout

HALF = (torch.bfloat16, torch.float16)


def packed_short_conv(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, layout: PackedLayout) -> Tensor:
    """`tree_short_conv` of a layout's tokens: in 16 bits on a GPU in one launch, if Triton is installed."""
    in_pytorch = layout.needs.kernels.linear_attention == "torch" or not (x_TD.is_cuda and x_TD.dtype in HALF)
    if in_pytorch or not _has_triton() or weight_DJ.shape[1] < 2:
        return tree_short_conv(x_TD, weight_DJ, bias_D, layout.ancestors_JT)
    from harts.layers.short_conv.kernel import tree_short_conv_rows

    widths = (weight_DJ.shape[0],)
    index = layout.indices.conv()
    return tree_short_conv_rows(x_TD, weight_DJ, bias_D, index=index, widths=widths, activation="none")[0]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
