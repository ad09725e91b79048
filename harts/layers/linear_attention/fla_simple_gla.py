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

from dataclasses import dataclass
from typing import Any

import torch
from fla.ops.common.chunk_o import chunk_bwd_dv, chunk_fwd_o
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from harts.layers.linear_attention.fla_arguments import chunks_of
from harts.layers.linear_attention.kernels.chunk_gradients import ChunkRows, ChunkStates, chunk_gradients
from harts.layers.linear_attention.kernels.decay_states import ChunkDecay, tree_state_gradients, tree_states
from harts.layers.linear_attention.kernels.mamba2_rows import input_gradients, outputs_at_tokens, times_steps
from harts.layers.linear_attention.ssd import SSDInputs
from harts.layers.rows import copy_rows
from harts.layout.conv_index import RowIndex
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Mamba2Rows:
    """What SSD reads in Mamba2, R rows in run order."""

    x: Tensor
    """[R, H, V], 16 bits. Convolved inputs of the heads."""
    step: Tensor
    """[R, H] > 0, any dtype. `dt`, past softplus and limits."""
    key: Tensor
    """[R, groups, K], 16 bits. `B`."""
    query: Tensor
    """[R, groups, K]. `C`."""


def tree_mamba2_by_fla(
    rows: Mamba2Rows, *, rate_H: Tensor, skip_H: Tensor, index: RowIndex, launch: LaunchIndex
) -> Tensor:
    """Mamba2's SSD with its skip term along every path.

    Args:
        rows: In run order, on the device.
        rate_H: [H] float32 < 0. `A = -exp(A_log)`.
        skip_H: [H]. `D`.
        index: Of the rows and the T tokens.
        launch: Of the rows.

    Returns:
        [T, H, V] float32. The products with steps are taken in float32, and `x * dt` is then rounded to the dtype of
        `x`; kernels made for Mamba2 round the keys times `dt` and the decay instead.
    """
    step = rows.step.float().contiguous()
    streams = (rows.query, rows.key, rows.x)
    return _Mamba2.apply((launch, index), *(x.contiguous() for x in streams), step, rate_H * step, skip_H.float())


class _SimpleGLA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: LaunchIndex, scale: float, *rows: Tensor) -> Tensor:
        query, key, value, decay = rows
        log2 = _log2(decay, launch)
        ctx.launch, ctx.scale = launch, scale
        ctx.save_for_backward(query, key, value, log2.g, log2.gamma)
        return _outputs(query, key, value, log2, scale=scale, launch=launch)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, g, gamma = ctx.saved_tensors
        log2, grad = ChunkDecay(g=g, gamma=gamma), grad_outputs[0].contiguous()
        return None, None, *_gradients(query, key, value, grad, log2, scale=ctx.scale, launch=ctx.launch)


class _Mamba2(torch.autograd.Function):
    """SSD between what `kernels/mamba2_rows.py` has, so that gradients of its inputs are added up once."""

    @staticmethod
    def forward(ctx: Any, where: tuple[LaunchIndex, RowIndex], *streams: Tensor) -> Tensor:
        query, key, x, step, decay, skip = streams
        launch, index = where
        log2 = _log2(decay[None], launch)
        value = times_steps(x, step)
        output = _outputs(query[None], key[None], value[None], log2, scale=1.0, launch=launch)
        ctx.where = where
        ctx.save_for_backward(query, key, x, step, skip, value, log2.g)
        return outputs_at_tokens(output[0], x, skip, index.owner_T)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, x, step, skip, value, g = ctx.saved_tensors
        launch, index = ctx.where
        dout = copy_rows(grad_outputs[0], index.owned_token_R, dtype=x.dtype)
        query, key, value = query[None], key[None], value[None]
        dq, dk, dv, ddecay = _gradients(query, key, value, dout[None], ChunkDecay(g=g), scale=1.0, launch=launch)
        assert ddecay is not None
        dx, dstep, dskip = input_gradients(dv[0], dout, x, step, skip)
        return None, dq[0], dk[0], dx, dstep, ddecay[0], dskip


def _log2(decay: Tensor, launch: LaunchIndex) -> ChunkDecay:
    """Decays [1, R, H] or [H] for kernels that take powers of two, as fla's do."""
    if decay.dim() == 1:
        return ChunkDecay(gamma=decay * RCP_LN2)
    return ChunkDecay(g=chunk_local_cumsum(decay, scale=RCP_LN2, **chunks_of(launch)))


def _outputs(
    query: Tensor, key: Tensor, value: Tensor, log2: ChunkDecay, *, scale: float, launch: LaunchIndex
) -> Tensor:
    h = tree_states(key, value, log2, launch=launch, dtype=key.dtype)
    return chunk_fwd_o(q=query, k=key, v=value, h=h, g=log2.g, g_gamma=log2.gamma, scale=scale, **chunks_of(launch))


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, grad: Tensor, log2: ChunkDecay, *, scale: float, launch: LaunchIndex
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Of queries, keys, values and decays, if they differ by token."""
    chunks, gates = chunks_of(launch), log2.g
    h = tree_states(key, value, log2, launch=launch, dtype=key.dtype)
    dh = tree_state_gradients(query, grad, log2, scale=scale, launch=launch, dtype=key.dtype)
    if gates is None:
        assert log2.gamma is not None
        gates = chunk_local_cumsum(log2.gamma.expand(*value.shape[:2], -1).contiguous(), **chunks)
    rows = ChunkRows(q=query, k=key, v=value, g=gates, do=grad, dv=None)
    dq, dk, _, dg = chunk_gradients(rows, ChunkStates(h=h, dh=dh), scale=scale, launch=launch)
    dv = chunk_bwd_dv(q=query, k=key, do=grad, dh=dh, g=log2.g, g_gamma=log2.gamma, scale=scale, **chunks)
    return dq, dk, dv.to(value.dtype), None if log2.g is None else chunk_local_cumsum(dg, reverse=True, **chunks)
