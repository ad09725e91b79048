"""What Gated DeltaNet layers of all families share between their input and output projections."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.layers.activation import silu_after_convolution
from harts.layers.linear_attention.choice import linear_kernel
from harts.layers.linear_attention.chunk_core import tree_gated_delta_rule
from harts.layers.linear_attention.inputs import GatedDeltaInputs, GatedNorm
from harts.layers.short_conv.packed import packed_short_conv
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
    norm: GatedNorm,
    *,
    max_beta: float = 1.0,
) -> Tensor:
    """Short convolution, gates, the delta rule along every path, and the gated norm.

    Args:
        layer: A transformers Gated DeltaNet; its convolution, gate parameters and head sizes are read.
        mixed_TD: [T, D] queries, keys and values as projected, side by side.
        a_TH: [T, H] projected decay.
        b_TH: [T, H] projected step size.
        layout: Of the T tokens.
        norm: Of the outputs.
        max_beta: Upper end of the step size: 2 lets transitions have negative eigenvalues (arXiv 2411.12537).

    Returns:
        [T, H, V] in the dtype of `mixed_TD`, before the output projection.
    """
    if linear_kernel(mixed_TD, layout, widths=(layer.head_k_dim, layer.head_v_dim)) == "fla":
        output_RHV = _by_fla(layer, mixed_TD, *_gates(layer, a_TH, b_TH, max_beta), layout)
        return normed_tokens(output_RHV, norm, layout)
    convolution = layer.conv1d
    convolved_TD = packed_short_conv(mixed_TD, convolution.weight.squeeze(1), convolution.bias, layout)
    query, key, value = F.silu(convolved_TD).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    compute = torch.promote_types(mixed_TD.dtype, torch.float32)
    copies = layer.num_v_heads // layer.num_k_heads
    query_THK, key_THK = (
        _l2_normalise(x.unflatten(-1, (-1, layer.head_k_dim)).to(compute)).repeat_interleave(copies, dim=1)
        for x in (query, key)
    )
    decay_TH, beta_TH = _gates(layer, a_TH, b_TH, max_beta)
    inputs = GatedDeltaInputs(
        query=query_THK * layer.head_k_dim**-0.5,
        key=key_THK,
        value=value.unflatten(-1, (-1, layer.head_v_dim)).to(compute),
        decay=decay_TH,
        beta=beta_TH.to(compute),
    )
    output_THV = tree_gated_delta_rule(inputs, layout.chunks).to(mixed_TD.dtype)
    return norm.module(output_THV, norm.gate_THV)


def normed_tokens(output_RHV: Tensor, norm: GatedNorm, layout: PackedLayout) -> Tensor:
    """The gated norm of each token's own row, on a GPU.

    Args:
        output_RHV: [R, H, V] of the delta rule, in run order.
        norm: Of the outputs.
        layout: Of the T tokens.

    Returns:
        [T, H, V] in the dtype of `output`.
    """
    from harts.layers.linear_attention.kernels.gated_norm import normed_outputs
    from harts.layers.rows import owned_rows

    rows = layout.indices.launch_conv().rows
    if layout.needs.kernels.exact:  # what runs flat rounds as transformers does
        return norm.module(owned_rows(output_RHV, rows), norm.gate_THV)
    return normed_outputs(output_RHV, norm, rows)


def _gates(layer: GatedDeltaNetLayer, a_TH: Tensor, b_TH: Tensor, max_beta: float) -> tuple[Tensor, Tensor]:
    """Log-decay in float32 or better, and step size in the dtype of its projection, both [T, H]."""
    compute = torch.promote_types(a_TH.dtype, torch.float32)
    decay_TH = -layer.A_log.to(compute).exp() * F.softplus(a_TH.to(compute) + layer.dt_bias.to(compute))
    return decay_TH, max_beta * b_TH.sigmoid()


def _by_fla(
    layer: GatedDeltaNetLayer, mixed_TD: Tensor, decay_TH: Tensor, beta_TH: Tensor, layout: PackedLayout
) -> Tensor:
    """Convolution straight into run order, and the delta rule there: [R, H, V]."""
    from harts.layers.linear_attention.fla_delta_rule import tree_delta_rule
    from harts.layers.rows import take_rows
    from harts.layers.short_conv.kernel import tree_short_conv_rows

    index = layout.indices.launch_conv()
    query, key, value = tree_short_conv_rows(
        mixed_TD,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        index=index,
        widths=(layer.key_dim, layer.key_dim, layer.value_dim),
        activation=silu_after_convolution(),
    )
    rows = GatedDeltaInputs(
        query=query.unflatten(-1, (-1, layer.head_k_dim)),
        key=key.unflatten(-1, (-1, layer.head_k_dim)),
        value=value.unflatten(-1, (-1, layer.head_v_dim)),
        decay=take_rows(decay_TH, index.rows),
        beta=take_rows(beta_TH, index.rows),
    )
    return tree_delta_rule(rows, layout.indices.launch())


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPSILON)
