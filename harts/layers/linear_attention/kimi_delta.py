"""What Kimi Delta Attention layers of all families share between their input and output projections."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.layers.activation import silu_after_convolution
from harts.layers.linear_attention.choice import linear_kernel
from harts.layers.linear_attention.chunk_core import tree_gated_delta_rule
from harts.layers.linear_attention.gated_delta_net import L2_NORM_EPSILON, normed_tokens
from harts.layers.linear_attention.inputs import DecayGate, GatedDeltaInputs, GatedNorm
from harts.layers.short_conv.packed import packed_short_conv
from harts.layout.packed import PackedLayout


class KimiDeltaLayer(Protocol):
    """What is read of a transformers Kimi Delta Attention, whatever its family."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    b_proj: nn.Linear
    conv1d: nn.Conv1d
    head_dim: int

    @property
    def forget_gate(self) -> nn.Module:
        """From [1, T, D] to the log-decay of every key channel, [1, T, H, K]; bounded or not."""
        ...

    def decay_gate(self, hidden_TD: Tensor) -> DecayGate:
        """What the same log-decays are computed from."""
        ...


def tree_kimi_delta_attention(
    layer: KimiDeltaLayer, hidden_TD: Tensor, layout: PackedLayout, norm: GatedNorm
) -> Tensor:
    """Projections, short convolution, gates, the delta rule along every path, and the gated norm.

    Kimi Linear (arXiv 2510.26692, section 4).

    Args:
        layer: A transformers Kimi Delta Attention.
        hidden_TD: [T, D] its input.
        layout: Of the T tokens.
        norm: Of the outputs.

    Returns:
        [T, H, V] in the dtype of `hidden_TD`, before the output projection.
    """
    projected = [layer.q_proj(hidden_TD), layer.k_proj(hidden_TD), layer.v_proj(hidden_TD)]
    compute = torch.promote_types(hidden_TD.dtype, torch.float32)
    beta_TH = layer.b_proj(hidden_TD).sigmoid()
    if linear_kernel(projected[0], layout, widths=(layer.head_dim, layer.head_dim)) == "fla":
        output_RHV = _by_fla(layer, projected, layer.decay_gate(hidden_TD), beta_TH, layout)
        return normed_tokens(output_RHV, norm, layout)
    mixed_TD, convolution = torch.cat(projected, dim=-1), layer.conv1d
    # In the dtype of the taps, which some families keep in float32.
    convolved_TD = packed_short_conv(
        mixed_TD.to(convolution.weight.dtype), convolution.weight.squeeze(1), convolution.bias, layout
    )
    query_THK, key_THK, value_THV = (
        x.unflatten(-1, (-1, layer.head_dim)).to(compute)
        for x in F.silu(convolved_TD).to(hidden_TD.dtype).chunk(3, dim=-1)
    )
    inputs = GatedDeltaInputs(
        query=_l2_normalise(query_THK) * layer.head_dim**-0.5,
        key=_l2_normalise(key_THK),
        value=value_THV,
        decay=layer.forget_gate(hidden_TD[None])[0].to(compute),
        beta=beta_TH.to(compute),
    )
    output_THV = tree_gated_delta_rule(inputs, layout.chunks).to(hidden_TD.dtype)
    return norm.module(output_THV, norm.gate_THV)


def _by_fla(
    layer: KimiDeltaLayer, projected: list[Tensor], gate: DecayGate, beta_TH: Tensor, layout: PackedLayout
) -> Tensor:
    """Convolutions and decays straight into run order, and the delta rule there: [R, H, V]."""
    from harts.layers.linear_attention.fla_delta_rule import tree_delta_rule
    from harts.layers.linear_attention.kernels.decay_rows import decay_rows
    from harts.layers.rows import take_rows
    from harts.layers.short_conv.kernel import tree_short_conv_rows

    index = layout.indices.launch_conv()
    width = projected[0].shape[-1]
    weights = layer.conv1d.weight.squeeze(1).split(width)
    biases = [None] * 3 if layer.conv1d.bias is None else layer.conv1d.bias.split(width)
    silu = silu_after_convolution()
    query, key, value = (
        tree_short_conv_rows(x_TD, weight_DJ, bias_D, index=index, widths=(width,), activation=silu)[0]
        for x_TD, weight_DJ, bias_D in zip(projected, weights, biases, strict=True)
    )
    rows = GatedDeltaInputs(
        query=query.unflatten(-1, (-1, layer.head_dim)),
        key=key.unflatten(-1, (-1, layer.head_dim)),
        value=value.unflatten(-1, (-1, layer.head_dim)),
        decay=decay_rows(gate, index.rows),
        beta=take_rows(beta_TH, index.rows),
    )
    return tree_delta_rule(rows, layout.indices.launch())


def _l2_normalise(x: Tensor) -> Tensor:
    # Divided by the root, where Gated DeltaNet multiplies with its inverse: as each rounds in transformers.
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPSILON)
