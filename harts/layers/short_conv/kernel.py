"""Short convolution on a GPU: one launch forward, straight into run order, with the activation fused.

Imports Triton: only what runs on a GPU imports this file; `ancestor_gather.py` is the definition. Sums are taken in
float32 in the definition's order and rounded after the activation, before it too where asked. Gradients are the same
from run to run.
"""

# Triton's kernels are launched by subscript.
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from harts.layers.activation import Activation
from harts.layers.rows import sum_shared_rows
from harts.layers.short_conv.kernels import branching_gradient_kernel, conv_backward_kernel, conv_forward_kernel
from harts.layout.conv_index import ConvIndex

MAX_PIECES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Launch shape of a kernel, from `python -m benchmarks.layers conv --sweep`."""

    rows: int
    """Rows or tokens of a program."""
    channels: int
    """Most channels of a program, a power of two."""
    warps: int
    """Warps of a program."""
    unroll: int = 1
    """Tokens that the backward pass loads at once."""


FORWARD_TILE = Tile(rows=16, channels=256, warps=4)
BACKWARD_TILE = Tile(rows=128, channels=256, warps=2, unroll=2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Options:
    index: ConvIndex
    widths: tuple[int, ...]
    activation: Activation
    forward_tile: Tile
    backward_tile: Tile


def tree_short_conv_rows(
    x_TD: Tensor,
    weight_DJ: Tensor,
    bias_D: Tensor | None,
    *,
    index: ConvIndex,
    widths: Sequence[int],
    activation: Activation,
    tiles: tuple[Tile, Tile] = (FORWARD_TILE, BACKWARD_TILE),
) -> tuple[Tensor, ...]:
    """Depthwise causal convolution of every root-to-leaf path, cut into pieces by channel.

    Args:
        x_TD: [T, D] in pre-order, bfloat16, float16 or float32. Rows may be part of wider ones.
        weight_DJ: [D, J], 2 <= J <= `index.num_taps`, the last column for the token itself, as in `nn.Conv1d`.
        bias_D: [D] or None.
        index: Of the T tokens, on the same device; its rows are those of the outputs.
        widths: Channels of each output, up to four; they add up to D.
        activation: What follows the convolution.
        tiles: Launch shapes of the forward and the backward pass.

    Returns:
        One contiguous [R, width] tensor a width, in the dtype of `x_TD`: `activation(tree_short_conv(...))[token_R]`.

    Raises:
        ValueError: If shapes do not fit one another, or the convolution is wider than the index allows.

    Example (queries, keys and values of a Gated DeltaNet):
        >>> q, k, v = tree_short_conv_rows(
        ...     mixed_TD, weight_DJ, None, index=index, widths=(2048, 2048, 4096), activation="silu"
        ... )  # doctest: +SKIP
    """
    channels, taps = weight_DJ.shape
    if x_TD.shape != (index.rows.num_tokens, channels) or sum(widths) != channels or not 1 <= len(widths) <= MAX_PIECES:
        raise ValueError(
            f"Got x {list(x_TD.shape)}, weight {list(weight_DJ.shape)} and widths {list(widths)}, expected x "
            f"[{index.rows.num_tokens}, {channels}] and up to {MAX_PIECES} widths that add up to {channels}."
        )
    if not 2 <= taps <= index.num_taps:
        raise ValueError(
            f"Got {taps} taps, expected 2 to {index.num_taps}. Build the index for the model's widest convolution."
        )
    options = _Options(
        index=index,
        widths=tuple(widths),
        activation=activation,
        forward_tile=tiles[0],
        backward_tile=tiles[1],
    )
    return _TreeShortConv.apply(x_TD, weight_DJ, bias_D, options)


class _TreeShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, options: _Options
    ) -> tuple[Tensor, ...]:
        x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
        weight_DJ = weight_DJ.contiguous()
        index, tile = options.index, options.forward_tile
        pieces = tuple(x_TD.new_empty(index.rows.num_rows, width) for width in options.widths)
        shape = _launch_shape(x_TD, weight_DJ, bias_D, options, tile)
        conv_forward_kernel[(triton.cdiv(index.rows.num_rows, tile.rows) * shape["BLOCKS_D"],)](
            x_TD,
            weight_DJ,
            weight_DJ if bias_D is None else bias_D,
            index.ancestors_RJ,
            *_padded(pieces),
            index.rows.num_rows,
            x_TD.stride(0),
            **shape,
            BLOCK_R=tile.rows,
            num_warps=tile.warps,
        )
        ctx.save_for_backward(x_TD, weight_DJ, bias_D)
        ctx.options = options
        return pieces

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_DJ, bias_D = ctx.saved_tensors
        options: _Options = ctx.options
        index, tile = options.index, options.backward_tile
        upstream = tuple(grad.contiguous() for grad in grad_outputs)
        (tokens, channels), taps = x_TD.shape, weight_DJ.shape[1]
        floats = {"dtype": torch.float32, "device": x_TD.device}
        shared_sum = torch.empty(index.rows.num_shared, channels, **floats)
        for grad, columns in zip(upstream, shared_sum.split(options.widths, dim=1), strict=True):
            sum_shared_rows(grad, index.rows, columns, at_tokens=False)
        needed = torch.empty(index.num_slots, channels, **floats)
        tiles = triton.cdiv(tokens, tile.rows)
        with_weights = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        partial = torch.empty(tiles if with_weights else 0, taps + 1, channels, **floats)
        dx_TD = x_TD.new_empty(tokens, channels)
        shape = _launch_shape(x_TD, weight_DJ, bias_D, options, tile)
        conv_backward_kernel[(tiles * shape["BLOCKS_D"],)](
            x_TD,
            weight_DJ,
            weight_DJ if bias_D is None else bias_D,
            index.ancestors_TJ,
            index.rows.first_row_T,
            index.flags_T,
            index.rows.shared_slot_T,
            index.slot_T,
            *_padded(upstream),
            shared_sum,
            dx_TD,
            needed,
            partial,
            tokens,
            x_TD.stride(0),
            **shape,
            WEIGHT_GRADIENT=with_weights,
            BLOCK_T=tile.rows,
            UNROLL=tile.unroll,
            num_warps=tile.warps,
        )
        _write_branching_tokens(dx_TD, needed, weight_DJ, index)
        if not with_weights:
            return dx_TD, None, None, None
        total = partial.sum(0)
        dbias_D = None if bias_D is None else total[taps].to(bias_D.dtype)
        return dx_TD, total[:taps].T.to(weight_DJ.dtype).contiguous(), dbias_D, None


def _write_branching_tokens(dx_TD: Tensor, needed: Tensor, weight_DJ: Tensor, index: ConvIndex) -> None:
    if index.num_branching == 0:
        return
    (channels, taps), block = weight_DJ.shape, 512
    branching_gradient_kernel[(index.num_branching, triton.cdiv(channels, block))](
        needed,
        weight_DJ,
        dx_TD,
        index.branch_token_M,
        index.branch_offsets,
        index.branch_slot,
        index.branch_distance,
        channels,
        TAPS=taps,
        BLOCK_D=block,
        num_warps=4,
    )


def _launch_shape(x: Tensor, weight: Tensor, bias: Tensor | None, options: _Options, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments that both passes take."""
    block = min(tile.channels, triton.next_power_of_2(max(options.widths)))
    widths = options.widths + (0,) * (MAX_PIECES - len(options.widths))
    return {
        **{f"W{i}": width for i, width in enumerate(widths)},
        "TAPS": weight.shape[1],
        "TABLE": options.index.num_taps,
        "SILU": options.activation != "none",
        "ROUNDED": options.activation == "rounded silu",
        "HAS_BIAS": bias is not None,
        # Triton's interpreter knows no PTX.
        "APPROXIMATE": x.is_cuda,
        "BLOCK_D": block,
        "BLOCKS_D": sum(triton.cdiv(width, block) for width in options.widths),
    }


def _padded(pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return pieces + pieces[-1:] * (MAX_PIECES - len(pieces))
