"""Linear attention with scalar decays on a whole tree through fla's kernels: lightning attention and Mamba2's SSD.

fla's `chunk_simple_gla` is four kernels. Two are parallel over chunks and are called here as they are; the states
between chunks follow the tree (`kernels/decay_states.py`), and gradients inside chunks are ours
(`kernels/chunk_gradients.py`). SSD is the same recurrence under other names: queries `C`,
keys `B`, values `x * dt`, log-decays `A * dt`, and a skip term.

What fla cannot do, and where a layer runs through PyTorch instead (`ssd.py`, `lightning.py`):
- Chunks of more than 64 tokens: its kernels keep a chunk times a chunk in registers. Results do not depend on the size
  of chunks but for rounding, so layers whose models cut into 128 or 256 (Mamba2, MiniMax) run here in chunks of 64, on
  the tree as on each path alone. Bits are those of fla on the path, not those of another library's kernel.
- float32: its products would be taken in tf32.
- Decays rounded to 16 bits, which a bfloat16 MiniMax multiplies by in transformers: decays are float32 here.

Imported only where fla is installed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from fla.ops.common.chunk_o import chunk_bwd_dv, chunk_fwd_o
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from harts.layers.linear_attention.fla_arguments import chunks_of
from harts.layers.linear_attention.kernels.chunk_gradients import ChunkRows, ChunkStates, chunk_gradients
from harts.layers.linear_attention.kernels.decay_states import ChunkDecay, tree_state_gradients, tree_states
from harts.layers.linear_attention.ssd import SSDInputs
from harts.layout.launch import LaunchIndex

CHUNK_SIZE = 64
"""C, the largest that fla's kernels have room for."""


def tree_simple_gla(inputs: SSDInputs, launch: LaunchIndex, *, scale: float = 1.0) -> Tensor:
    """`S = exp(decay) S_parent + key value^T; out = scale S^T query` along every path, on rows in run order.

    Args:
        inputs: R rows, on the device: queries and keys [R, groups, K] and values [R, H, V] of one dtype, 16 bits;
            decays [R, H] float32. Or [H], decays that are the same at all tokens and take no gradient. H is a multiple
            of the groups, whose keys are not repeated.
        launch: Of the same rows.
        scale: Of the queries.

    Returns:
        [R, H, V] in the dtype of the values. Rows that another row owns are computed too and take no gradient.

    Raises:
        ValueError: If the launch is planned for chunks of more than 64 tokens, or not for a power of two.
    """
    size = launch.chunk_size
    if size > CHUNK_SIZE or size & (size - 1):
        raise ValueError(
            f"Got a launch planned for chunks of {size} tokens, expected a power of two up to {CHUNK_SIZE}: fla has no "
            f"room for more. Plan the launch for chunks of {CHUNK_SIZE}, or run the layer through PyTorch."
        )
    rows = [x.unsqueeze(0).contiguous() for x in (inputs.query, inputs.key, inputs.value)]
    decay = inputs.decay.float().contiguous()
    return _SimpleGLA.apply(launch, float(scale), *rows, decay if decay.dim() == 1 else decay.unsqueeze(0)).squeeze(0)


def tree_lightning_rows(
    query_RHK: Tensor, key_RHK: Tensor, value_RHV: Tensor, *, slope_H: Tensor, launch: LaunchIndex
) -> Tensor:
    """Lightning attention along every path, on rows in run order.

    Args:
        query_RHK, key_RHK: [R, H, K], 16 bits.
        value_RHV: [R, H, V].
        slope_H: [H] float32, >= 0. It takes no gradient.
        launch: Of the R rows.

    Returns:
        [R, H, V]: `out = S^T q` with `S = exp(-slope) S_parent + k v^T`.
    """
    return tree_simple_gla(SSDInputs(query=query_RHK, key=key_RHK, value=value_RHV, decay=-slope_H), launch)


def tree_mamba2_rows(
    x_RHV: Tensor, step_RH: Tensor, *, rate_H: Tensor, key: Tensor, query: Tensor, skip_H: Tensor, launch: LaunchIndex
) -> Tensor:
    """Mamba2's SSD with its skip term along every path, on rows in run order.

    Args:
        x_RHV: [R, H, V], 16 bits. Convolved inputs of the heads.
        step_RH: [R, H] > 0, any dtype. `dt`, past softplus and limits.
        rate_H: [H] float32 < 0. `A = -exp(A_log)`.
        key: [R, groups, K], 16 bits. `B`.
        query: [R, groups, K]. `C`.
        skip_H: [H]. `D`.
        launch: Of the R rows.

    Returns:
        [R, H, V] float32. The products with steps are taken in float32, and `x * dt` is then rounded to the dtype of
        `x`; kernels made for Mamba2 round the keys times `dt` and the decay instead.
    """
    step_RH = step_RH.float()
    value_RHV = x_RHV.float() * step_RH.unsqueeze(-1)
    inputs = SSDInputs(query=query, key=key, value=value_RHV.to(x_RHV.dtype), decay=rate_H * step_RH)
    return tree_simple_gla(inputs, launch).float() + skip_H.float().unsqueeze(-1) * x_RHV


class _SimpleGLA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: LaunchIndex, scale: float, *rows: Tensor) -> Tensor:
        query, key, value, decay = rows
        # fla's kernels take powers of two.
        if decay.dim() == 1:
            log2 = ChunkDecay(gamma=decay * RCP_LN2)
        else:
            log2 = ChunkDecay(g=chunk_local_cumsum(decay, scale=RCP_LN2, **chunks_of(launch)))
        h = tree_states(key, value, log2, launch=launch, dtype=key.dtype)
        output = chunk_fwd_o(
            q=query, k=key, v=value, h=h, g=log2.g, g_gamma=log2.gamma, scale=scale, **chunks_of(launch)
        )  # fmt: skip
        ctx.launch, ctx.scale = launch, scale
        ctx.save_for_backward(query, key, value, log2.g, log2.gamma)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, g, gamma = ctx.saved_tensors
        launch, scale, grad = ctx.launch, ctx.scale, grad_outputs[0].contiguous()
        log2, chunks = ChunkDecay(g=g, gamma=gamma), chunks_of(launch)
        h = tree_states(key, value, log2, launch=launch, dtype=key.dtype)
        dh = tree_state_gradients(query, grad, log2, scale=scale, launch=launch, dtype=key.dtype)
        gates = g
        if gates is None:
            gates = chunk_local_cumsum(gamma.expand(*value.shape[:2], -1).contiguous(), **chunks)
        rows = ChunkRows(q=query, k=key, v=value, g=gates, do=grad, dv=None)
        dq, dk, _, dg = chunk_gradients(rows, ChunkStates(h=h, dh=dh), scale=scale, launch=launch)
        dv = chunk_bwd_dv(q=query, k=key, do=grad, dh=dh, g=g, g_gamma=gamma, scale=scale, **chunks)
        if g is not None:
            dg = chunk_local_cumsum(dg, reverse=True, **chunks)
        return None, None, dq, dk, dv.to(value.dtype), None if g is None else dg
