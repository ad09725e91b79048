"""Gradients inside chunks of linear attention with one decay a head: queries, keys, decays, keys of the WY form.

Parallel over chunks. What fla's `chunk_bwd_dqkwg` computes (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li and contributors),
which Triton from 3.4 to before 3.7.1 compiles wrongly on Hopper, in another order of work: a program takes all value
heads of a key head, so that queries and keys are read once and their gradients leave summed over heads, in float32.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.kernels.chunks import rows_of_chunk
from harts.layers.linear_attention.kernels.queue import LaunchShape, padded
from harts.layout.launch import LaunchIndex


@triton.jit
def _gradients(
    q, k, v, g, h, dh, do, dv, dq, dk, dw, dg, cu_seqlens, chunk_indices, num_rows, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, USE_W: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k = tl.program_id(0) % NK
    chunk = (tl.program_id(0) // NK).to(tl.int64)
    i_h = tl.program_id(1)
    first, left = rows_of_chunk(chunk, cu_seqlens, chunk_indices, BT)
    rows = left.to(tl.int32)

    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_t < rows, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    m_tt = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
    row_k = (first * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    sum_dq = tl.zeros([BT, BK], dtype=tl.float32)
    sum_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for head in range(i_h * (HV // H), (i_h + 1) * (HV // H)):
        row_v = (first * HV + head) * V
        state = (chunk * HV + head) * K * V
        p_g = first * HV + head + o_t * HV
        b_g = tl.load(g + p_g, mask=m_t, other=0.0)
        g_last = tl.load(g + (first + tl.minimum(BT, rows) - 1) * HV + head)

        # Keys first and queries then: both at a time take more registers than there are.
        b_ds = tl.zeros([BT, BT], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            p_v = row_v + o_t[:, None] * (HV * V) + o_v[None, :]
            m_tv = m_t[:, None] & m_v[None, :]
            b_do = tl.load(do + p_v, mask=m_tv, other=0.0)
            b_v = tl.load(v + p_v, mask=m_tv, other=0.0)
            b_dh = tl.load(dh + state + o_k[:, None] * V + o_v[None, :], mask=m_k[:, None] & m_v[None, :], other=0.0)
            b_ds = tl.dot(b_do, tl.trans(b_v), b_ds)
            b_dk = tl.dot(b_v, tl.trans(b_dh), b_dk)
        b_dk *= tl.where(m_t, tl.exp2(g_last - b_g), 0)[:, None]
        b_k = tl.load(k + row_k, mask=m_tk, other=0.0)
        b_q = tl.load(q + row_k, mask=m_tk, other=0.0)
        last = tl.sum(b_dk * b_k)
        b_ds = tl.where(m_tt, b_ds * tl.exp2(b_g[:, None] - b_g[None, :]) * scale, 0)
        b_ds = b_ds.to(b_k.dtype)
        b_dk = tl.dot(tl.trans(b_ds), b_q, b_dk)
        b_dg = -tl.sum(b_dk * b_k, 1)
        sum_dk += b_dk

        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
        b_hdh = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            p_v = row_v + o_t[:, None] * (HV * V) + o_v[None, :]
            p_h = state + o_k[:, None] * V + o_v[None, :]
            m_tv = m_t[:, None] & m_v[None, :]
            m_kv = m_k[:, None] & m_v[None, :]
            b_do = tl.load(do + p_v, mask=m_tv, other=0.0)
            b_h = tl.load(h + p_h, mask=m_kv, other=0.0)
            b_dh = tl.load(dh + p_h, mask=m_kv, other=0.0)
            b_dq = tl.dot(b_do, tl.trans(b_h), b_dq)
            if USE_W:
                b_dv = tl.load(dv + p_v, mask=m_tv, other=0.0)
                b_dw = tl.dot(b_dv, tl.trans(b_h), b_dw)
            b_hdh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        if USE_W:
            p_w = (first * HV + head) * K + o_t[:, None] * (HV * K) + o_k[None, :]
            tl.store(dw + p_w, -b_dw.to(dw.dtype.element_ty), mask=m_tk)
        b_dq *= (tl.exp2(b_g) * scale)[:, None]
        b_k = tl.load(k + row_k, mask=m_tk, other=0.0)
        b_q = tl.load(q + row_k, mask=m_tk, other=0.0)
        b_dq = tl.dot(b_ds, b_k, b_dq)
        last += tl.sum(b_hdh) * tl.exp2(g_last)
        b_dg += tl.sum(b_dq * b_q, 1) + tl.where(o_t == tl.minimum(BT, rows) - 1, last, 0)
        tl.store(dg + i_k.to(tl.int64) * num_rows * HV + p_g, b_dg, mask=m_t)
        sum_dq += b_dq
    tl.store(dq + row_k, sum_dq.to(dq.dtype.element_ty), mask=m_tk)
    tl.store(dk + row_k, sum_dk.to(dk.dtype.element_ty), mask=m_tk)


SHAPE = LaunchShape(block_k=128, block_v=64, num_warps=8, num_stages=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkStates:
    """States at the ends of every chunk, of G chunks."""

    h: Tensor
    """[1, G, HV, K, V] before it, in the dtype of queries."""
    dh: Tensor
    """[1, G, HV, K, V]. Gradient of the state after it, alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRows:
    """R rows in run order. Shapes have fla's leading 1; HV is a multiple of H. All in 16 bits but for `g`."""

    q: Tensor
    """[1, R, H, K] queries."""
    k: Tensor
    """[1, R, H, K] keys."""
    v: Tensor
    """[1, R, HV, V] values that chunks write: of the WY form where there is one."""
    g: Tensor
    """[1, R, HV] float32. log2-decays, cumulative within chunks."""
    do: Tensor
    """[1, R, HV, V] gradients of the outputs."""
    dv: Tensor | None
    """[1, R, HV, V] whole gradients of the written values; None where there is no WY form."""


def chunk_gradients(
    rows: ChunkRows, states: ChunkStates, *, scale: float, launch: LaunchIndex
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of what a chunk reads.

    Args:
        rows: R rows.
        states: Of their chunks.
        scale: Of the queries.
        launch: Of the R rows.

    Returns:
        dq [1, R, H, K] and dk [1, R, H, K] in the dtype of the queries, dw [1, R, HV, K] alike (None without a WY
        form), and dg [1, R, HV] float32, of the cumulative decays (natural logarithms).
    """
    num_rows, num_key_heads, key_width = rows.q.shape[1:]
    num_heads, value_width = rows.v.shape[2:]
    block_k = min(SHAPE.block_k or key_width, padded(key_width))
    dq, dk = torch.empty_like(rows.q), torch.empty_like(rows.k)
    dw = None if rows.dv is None else rows.q.new_empty(1, num_rows, num_heads, key_width)
    tiles = triton.cdiv(key_width, block_k)
    dg = rows.g.new_empty(tiles, num_rows, num_heads)
    _gradients[(tiles * launch.slot_G.numel(), num_key_heads)](
        rows.q, rows.k, rows.v, rows.g, states.h, states.dh, rows.do, rows.dv, dq, dk, dw, dg, launch.cu_seqlens,
        launch.chunk_indices, num_rows, scale,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, BK=block_k,
        BV=min(SHAPE.block_v, padded(value_width)), USE_W=rows.dv is not None, num_warps=SHAPE.num_warps,
        num_stages=SHAPE.num_stages,
    )  # fmt: skip
    return dq, dk, dw, dg.sum(0, keepdim=True) if tiles > 1 else dg
