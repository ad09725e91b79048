"""Short convolution by ancestor gather: one launch for the whole tree, no rounds, nothing replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.gather import gather_rows


def tree_short_conv(x_TD: Tensor, weight_DW: Tensor, bias_D: Tensor | None, ancestors_WT: Tensor) -> Tensor:
    """Depthwise causal convolution of every root-to-leaf path.

    Args:
        x_TD: [T, D] in pre-order.
        weight_DW: [D, W], the last column for the token itself, as in `nn.Conv1d`.
        bias_D: [D] or None.
        ancestors_WT: [>= W - 1, T] int64. Row `w` holds each token's `w + 1`-th nearest ancestor, T for none.

    Returns:
        [T, D], summed in float32 or better, equal to `F.conv1d` with left zero padding on each path alone.
    """
    width = weight_DW.shape[1]
    accumulator = torch.promote_types(x_TD.dtype, torch.float32)
    wide_TD, weight_DW = x_TD.to(accumulator), weight_DW.to(accumulator)
    y_TD = wide_TD.new_zeros(()) if bias_D is None else bias_D.to(accumulator)
    # Farthest first with fused multiply-adds: the order in which PyTorch's own depthwise convolution adds up.
    for w in range(width - 1, 0, -1):
        y_TD = torch.addcmul(y_TD, gather_rows(wide_TD, ancestors_WT[w - 1]), weight_DW[:, width - 1 - w])
    return torch.addcmul(y_TD, wide_TD, weight_DW[:, width - 1]).to(x_TD.dtype)
