"""Short convolution by ancestor gather: one launch for the whole tree, no rounds, nothing replayed."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.gather import gather_rows


def tree_short_conv(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, ancestors_JT: Tensor) -> Tensor:
    """Depthwise causal convolution of every root-to-leaf path.

    Args:
        x_TD: [T, D] in pre-order.
        weight_DJ: [D, J], the last column for the token itself, as in `nn.Conv1d`.
        bias_D: [D] or None.
        ancestors_JT: [>= J - 1, T] int64. Row `j` holds each token's `j + 1`-th nearest ancestor, T for none.

    Returns:
        [T, D], summed in float32 or better, equal to `F.conv1d` with left zero padding on each path alone.
    """
    taps = weight_DJ.shape[1]
    accumulator = torch.promote_types(x_TD.dtype, torch.float32)
    wide_TD, weight_DJ = x_TD.to(accumulator), weight_DJ.to(accumulator)
    y_TD = wide_TD.new_zeros(()) if bias_D is None else bias_D.to(accumulator)
    # Farthest first with fused multiply-adds: the order in which PyTorch's own depthwise convolution adds up.
    for j in range(taps - 1, 0, -1):
        y_TD = torch.addcmul(y_TD, gather_rows(wide_TD, ancestors_JT[j - 1]), weight_DJ[:, taps - 1 - j])
    return torch.addcmul(y_TD, wide_TD, weight_DJ[:, taps - 1]).to(x_TD.dtype)
