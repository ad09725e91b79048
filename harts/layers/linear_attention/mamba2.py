"""What Mamba2 layers of all families share between their input projection and their gated norm."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harts.layers.activation import activation_of_kernel, silu_after_convolution
from harts.layers.linear_attention.choice import linear_kernel
from harts.layers.linear_attention.ssd import SSDInputs, tree_ssd
from harts.layers.short_conv.packed import packed_short_conv
from harts.layout.kernels import LinearKernel
from harts.layout.packed import PackedLayout


class Mamba2Layer(Protocol):
    """What is read of a transformers Mamba2 mixer, whatever its family."""

    conv1d: nn.Conv1d
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter
    # Any, since configurations also allow None there until their defaults are filled in.
    ssm_state_size: Any
    time_step_limit: Any

    @property
    def act(self) -> nn.Module:
        """Applied to what is convolved."""
        ...


class GroupNormModule(Protocol):
    """What is read of a transformers gated norm of groups of channels, whatever its family."""

    weight: nn.Parameter
    variance_epsilon: float

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """`weight * RMSNorm(hidden_states * silu(gate))`, over each group of channels."""
        ...


def tree_mamba2(layer: Mamba2Layer, projected_TD: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Short convolution, step sizes, SSD and the skip term along every path.

    Args:
        layer: A transformers Mamba2 mixer; its convolution, step and decay parameters and sizes are read.
        projected_TD: [T, D] the input projection: gate, what is convolved, and step sizes, side by side.
        layout: Of the T tokens.

    Returns:
        Outputs [T, H * V] in float32 or better and gates [T, H * V] as projected, both for the gated norm.
    """
    convolution, heads = layer.conv1d, layer.A_log.numel()
    width = projected_TD.shape[1] - convolution.out_channels - heads
    gate_TD, mixed_TD, step_TH = projected_TD.split([width, convolution.out_channels, heads], dim=-1)
    group_width = (convolution.out_channels - width) // 2
    widths = (width, group_width, group_width)
    # Softplus and limits act in the model's dtype, as they do in transformers.
    smallest, largest = layer.time_step_limit
    step_TH = F.softplus(step_TH + layer.dt_bias.to(step_TH.dtype)).clamp(min=smallest, max=largest)
    if _kernel(layer, gate_TD, layout) == "fla":
        return _by_fla(layer, mixed_TD, step_TH, widths, layout), gate_TD
    convolved_TD = packed_short_conv(mixed_TD, convolution.weight.squeeze(1), convolution.bias, layout)
    x_TD, key_TD, query_TD = layer.act(convolved_TD).split(widths, dim=-1)
    compute = torch.promote_types(projected_TD.dtype, torch.float32)
    step_TH, x_THV = step_TH.to(compute), x_TD.unflatten(-1, (heads, -1)).to(compute)
    inputs = SSDInputs(
        query=query_TD.unflatten(-1, (-1, layer.ssm_state_size)).to(compute),
        key=key_TD.unflatten(-1, (-1, layer.ssm_state_size)).to(compute),
        value=x_THV * step_TH.unsqueeze(-1),
        decay=-layer.A_log.to(compute).exp() * step_TH,
    )
    output_THV = tree_ssd(inputs, layout.chunks) + layer.D.unsqueeze(-1) * x_THV
    return output_THV.flatten(-2), gate_TD


def normed_mamba2(layer: Mamba2Layer, norm: GroupNormModule, projected_TD: Tensor, layout: PackedLayout) -> Tensor:
    """`tree_mamba2` with the gated norm that follows.

    Args:
        layer: As for `tree_mamba2`.
        norm: Of its outputs.
        projected_TD: [T, D] as for `tree_mamba2`.
        layout: Of the T tokens.

    Returns:
        [T, H * V] in the dtype of `projected_TD`, before the output projection.
    """
    output_TD, gate_TD = tree_mamba2(layer, projected_TD, layout)
    # What runs flat in exact mode rounds as transformers does.
    if _kernel(layer, gate_TD, layout) == "torch" or layout.needs.kernels.exact:
        return norm(output_TD, gate_TD).to(projected_TD.dtype)
    from fla.modules.norm.layernorm_gated import rmsnorm_fn  # pyright: ignore[reportMissingImports]

    # In transformers before 5.24 some families have one group.
    group_size = vars(norm).get("group_size", gate_TD.shape[1])
    return rmsnorm_fn(
        output_TD,
        norm.weight,
        None,
        z=gate_TD,
        eps=norm.variance_epsilon,
        group_size=group_size,
        norm_before_gate=False,
    ).to(projected_TD.dtype)


def _kernel(layer: Mamba2Layer, gate_TD: Tensor, layout: PackedLayout) -> LinearKernel:
    """What runs the layer, by the widths of its heads."""
    return linear_kernel(gate_TD, layout, widths=(layer.ssm_state_size, gate_TD.shape[1] // layer.A_log.numel()))


def _by_fla(
    layer: Mamba2Layer, mixed_TD: Tensor, step_TH: Tensor, widths: tuple[int, ...], layout: PackedLayout
) -> Tensor:
    """Convolution straight into run order, SSD there in fla's chunks, outputs back in packed order: [T, H * V]."""
    from harts.layers.linear_attention.fla_simple_gla import CHUNK_SIZE, Mamba2Rows, tree_mamba2_by_fla
    from harts.layers.rows import take_rows
    from harts.layers.short_conv.kernel import tree_short_conv_rows

    index = layout.indices.launch_conv(CHUNK_SIZE)
    activation = silu_after_convolution() if activation_of_kernel(layer.act) == "silu" else "none"
    x, key, query = tree_short_conv_rows(
        mixed_TD,
        layer.conv1d.weight.squeeze(1),
        layer.conv1d.bias,
        index=index,
        widths=widths,
        activation=activation,
    )
    if activation == "none":
        x, key, query = layer.act(x), layer.act(key), layer.act(query)
    rows = Mamba2Rows(
        x=x.unflatten(-1, (step_TH.shape[-1], -1)),
        step=take_rows(step_TH, index.rows),
        key=key.unflatten(-1, (-1, layer.ssm_state_size)),
        query=query.unflatten(-1, (-1, layer.ssm_state_size)),
    )
    rate_H, launch = -layer.A_log.float().exp(), layout.indices.launch(CHUNK_SIZE)
    return tree_mamba2_by_fla(rows, rate_H=rate_H, skip_H=layer.D, index=index.rows, launch=launch).flatten(-2)
