"""The definition: every path convolved alone, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def tree_short_conv_reference(x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, parent_T: Tensor) -> Tensor:
    """`y[t] = bias + sum_w weight[:, W-1-w] * x[w-th ancestor of t]`, zero above the root.

    Arguments as in `ancestor_gather.py`, but for `parent_T`: [T] int64, -1 at a root.
    """
    width = weight_DW.shape[1]
    rows = []
    for token in range(x_TD.shape[0]):
        total, ancestor = torch.zeros_like(x_TD[0]), token
        for w in range(width):
            if ancestor < 0:
                break
            total = total + weight_DW[:, width - 1 - w] * x_TD[ancestor]
            ancestor = int(parent_T[ancestor])
        rows.append(total if bias_D is None else total + bias_D)
    return torch.stack(rows)
