"""What Kimi Delta Attention layers of all families share between their input and output projections."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.layers.linear_attention.chunk_core import tree_gated_delta_rule
from harts.layers.linear_attention.gated_delta_net import L2_NORM_EPSILON
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.short_conv.ancestor_gather import tree_short_conv
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


def tree_kimi_delta_attention(layer: KimiDeltaLayer, hidden_TD: Tensor, layout: PackedLayout) -> Tensor:
    """Projections, short convolution, gates and the delta rule along every path (arXiv 2510.26692, section 4).

    Args:
        layer: A transformers Kimi Delta Attention.
        hidden_TD: [T, D] its input.
        layout: Of the T tokens.

    Returns:
        [T, H, V] in the dtype of `hidden_TD`, before the gated norm and the output projection.
    """
    assert layout.chunks is not None, "the family states chunk_size in its layout needs"
    mixed_TD = torch.cat([layer.q_proj(hidden_TD), layer.k_proj(hidden_TD), layer.v_proj(hidden_TD)], dim=-1)
    convolution = layer.conv1d
    # In the dtype of the taps, which some families keep in float32.
    convolved_TD = tree_short_conv(
        mixed_TD.to(convolution.weight.dtype), convolution.weight.squeeze(1), convolution.bias, layout.ancestors_JT
    )
    compute = torch.promote_types(hidden_TD.dtype, torch.float32)
    query_THK, key_THK, value_THV = (
        x.unflatten(-1, (-1, layer.head_dim)).to(compute)
        for x in F.silu(convolved_TD).to(hidden_TD.dtype).chunk(3, dim=-1)
    )
    inputs = GatedDeltaInputs(
        query=_l2_normalise(query_THK) * layer.head_dim**-0.5,
        key=_l2_normalise(key_THK),
        value=value_THV,
        decay=layer.forget_gate(hidden_TD[None])[0].to(compute),
        beta=layer.b_proj(hidden_TD).sigmoid().to(compute),
    )
    return tree_gated_delta_rule(inputs, layout.chunks).to(hidden_TD.dtype)


def _l2_normalise(x: Tensor) -> Tensor:
    # Divided by the root, where Gated DeltaNet multiplies with its inverse: as each rounds in transformers.
    return x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPSILON)
