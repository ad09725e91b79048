"""The definition: every path convolved alone, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.short_conv.gated import GatedShortConvLayer


def tree_short_conv_reference(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, parent_T: Tensor) -> Tensor:
    """`y[t] = bias + sum_j weight[:, J-1-j] * x[j-th ancestor of t]`, zero above the root.

    Arguments as in `ancestor_gather.py`, but for `parent_T`: [T] int64, -1 at a root.
    """
    taps = weight_DJ.shape[1]
    rows = []
    for token in range(x_TD.shape[0]):
        total, ancestor = torch.zeros_like(x_TD[0]), token
        for j in range(taps):
            if ancestor < 0:
                break
            total = total + weight_DJ[:, taps - 1 - j] * x_TD[ancestor]
            ancestor = int(parent_T[ancestor])
        rows.append(total if bias_D is None else total + bias_D)
    return torch.stack(rows)


def tree_gated_short_conv_reference(layer: GatedShortConvLayer, hidden_TD: Tensor, parent_T: Tensor) -> Tensor:
    """`out_proj(C * conv(B * x))` with `B, C, x = in_proj(hidden)`. Arguments as in `gated.py`, but for `parent_T`."""
    before_TD, after_TD, x_TD = layer.in_proj(hidden_TD).chunk(3, dim=-1)
    weight_DJ = layer.conv.weight.squeeze(1)
    return layer.out_proj(after_TD * tree_short_conv_reference(before_TD * x_TD, weight_DJ, layer.conv.bias, parent_T))
