"""Short convolution by ancestor gather: one launch for the whole tree, no rounds, nothing replayed."""

from __future__ import annotations

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
        [T, D], equal to `F.conv1d` with left zero padding on each path alone.
    """
    width = weight_DW.shape[1]
    y_TD = x_TD * weight_DW[:, width - 1]
    for w in range(1, width):
        y_TD = y_TD + gather_rows(x_TD, ancestors_WT[w - 1]) * weight_DW[:, width - 1 - w]
    return y_TD if bias_D is None else y_TD + bias_D
