"""The definition: every path convolved alone, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


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
