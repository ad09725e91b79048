"""What Gated DeltaNet layers of all families share between their input and output projections."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.layers.linear_attention.chunk_core import tree_gated_delta_rule
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layout.packed import PackedLayout

L2_NORM_EPSILON = 1e-6
"""That of transformers and fla."""


class GatedDeltaNetLayer(Protocol):
    """What is read of a transformers Gated DeltaNet, whatever its family."""

    conv1d: nn.Conv1d
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int


def tree_gated_delta_net(
    layer: GatedDeltaNetLayer,
    mixed_TD: Tensor,
    a_TH: Tensor,
    b_TH: Tensor,
    layout: PackedLayout,
    *,
    max_beta: float = 1.0,
) -> Tensor:
    """Short convolution, gates and the delta rule along every path.

    Args:
        layer: A transformers Gated DeltaNet; its convolution, gate parameters and head sizes are read.
        mixed_TD: [T, D] queries, keys and values as projected, side by side.
        a_TH: [T, H] projected decay.
        b_TH: [T, H] projected step size.
        layout: Of the T tokens.
        max_beta: Upper end of the step size: 2 lets transitions have negative eigenvalues (arXiv 2411.12537).

    Returns:
        [T, H, V] in the dtype of `mixed_TD`, before the gated norm and the output projection.
    """
    assert layout.chunks is not None, "the family states chunk_size in its layout needs"
    convolution = layer.conv1d
    convolved_TD = tree_short_conv(mixed_TD, convolution.weight.squeeze(1), convolution.bias, layout.ancestors_JT)
    query, key, value = F.silu(convolved_TD).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    compute = torch.promote_types(mixed_TD.dtype, torch.float32)
    copies = layer.num_v_heads // layer.num_k_heads
    query_THK, key_THK = (
        _l2_normalise(x.unflatten(-1, (-1, layer.head_k_dim)).to(compute)).repeat_interleave(copies, dim=1)
        for x in (query, key)
    )
    inputs = GatedDeltaInputs(
        query=query_THK * layer.head_k_dim**-0.5,
        key=key_THK,
        value=value.unflatten(-1, (-1, layer.head_v_dim)).to(compute),
        decay=-layer.A_log.to(compute).exp() * F.softplus(a_TH.to(compute) + layer.dt_bias.to(compute)),
        beta=(max_beta * b_TH.sigmoid()).to(compute),
    )
    return tree_gated_delta_rule(inputs, layout.chunks).to(mixed_TD.dtype)


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPSILON)
