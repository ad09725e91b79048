"""Gradients inside chunks of the delta rule with a decay a channel, but for those of products between its tokens.

Parallel over chunks. What fla's `chunk_kda_bwd_wy_dqkg_fused` computes (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li and
contributors), in another order of work: values first and then tiles of key channels, keys before queries, so that few
tiles are held at a time.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.kernels.chunk_gradients import ChunkStates
from harts.layers.linear_attention.kernels.chunks import rows_of_chunk
from harts.layers.linear_attention.kernels.queue import LaunchShape, padded
from harts.layout.launch import LaunchIndex


@triton.jit
def _gradients(
    q, k, v, written, g, beta, inverse, h, do, dh, du, dq, dk, dv, dg, dbeta, da, cu_seqlens, chunk_indices, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first, left = rows_of_chunk(chunk, cu_seqlens, chunk_indices, BT)
    rows = left.to(tl.int32)

    o_t = tl.arange(0, BT)
    m_t = o_t < rows
    one = first * HV + head
    key = (first * H + head // (HV // H)) * K
    state = (chunk * HV + head) * K * V
    b_b = tl.load(beta + one + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
    # Transposed: rows of the inverse are columns here.
    b_a = tl.load(inverse + one * BT + o_t[:, None] + o_t[None, :] * (HV * BT), mask=m_t[None, :], other=0.0)
    b_da = tl.zeros([BT, BT], dtype=tl.float32)
    b_db = tl.zeros([BT], dtype=tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        p_v = one * V + o_t[:, None] * (HV * V) + o_v[None, :]
        b_v = tl.load(v + p_v, mask=m_tv, other=0.0)
        b_du = tl.load(du + p_v, mask=m_tv, other=0.0)
        b_da = tl.dot(b_du, tl.trans(b_v), b_da)
        b_dvb = tl.dot(b_a, b_du)
        b_db += tl.sum(b_dvb * b_v, 1)
        tl.store(dv + p_v, (b_dvb * b_b[:, None]).to(dv.dtype.element_ty), mask=m_tv)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        p_k = one * K + o_t[:, None] * (HV * K) + o_k[None, :]
        p_key = key + o_t[:, None] * (H * K) + o_k[None, :]
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        for i_v in range(tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            p_v = one * V + o_t[:, None] * (HV * V) + o_v[None, :]
            p_h = state + o_k[:, None] * V + o_v[None, :]
            b_v = tl.load(written + p_v, mask=m_t[:, None] & m_v[None, :], other=0.0)
            b_dh = tl.load(dh + p_h, mask=m_k[:, None] & m_v[None, :], other=0.0)
            b_dk = tl.dot(b_v, tl.trans(b_dh), b_dk)
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
        b_hdh = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(tl.cdiv(V, BV)):
            o_v = i_v * BV + tl.arange(0, BV)
            m_v = o_v < V
            m_tv = m_t[:, None] & m_v[None, :]
            m_kv = m_k[:, None] & m_v[None, :]
            p_v = one * V + o_t[:, None] * (HV * V) + o_v[None, :]
            p_h = state + o_k[:, None] * V + o_v[None, :]
            b_do = tl.load(do + p_v, mask=m_tv, other=0.0)
            b_du = tl.load(du + p_v, mask=m_tv, other=0.0)
            b_h = tl.load(h + p_h, mask=m_kv, other=0.0)
            b_dh = tl.load(dh + p_h, mask=m_kv, other=0.0)
            b_dq = tl.dot(b_do, tl.trans(b_h), b_dq)
            b_dw = tl.dot(b_du, tl.trans(b_h), b_dw)
            b_hdh += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)

        b_g = tl.load(g + p_k, mask=m_tk, other=0.0)
        b_e = tl.exp2(b_g)
        g_last = tl.load(g + (one + (tl.minimum(BT, rows) - 1) * HV) * K + o_k, mask=m_k, other=0.0)
        b_k = tl.load(k + p_key, mask=m_tk, other=0.0)
        b_kg = b_k * b_e
        b_dw = -b_dw.to(b_a.dtype)
        b_da = tl.dot(b_dw, tl.trans(b_kg.to(b_a.dtype)), b_da)
        b_dkg = tl.dot(b_a, b_dw)
        b_db += tl.sum(b_dkg * b_kg, 1)
        b_dkg *= b_b[:, None]
        b_dk *= tl.where(m_t[:, None], tl.exp2(g_last[None, :] - b_g), 0)
        b_kdk = b_k * b_dk
        last = b_hdh * tl.exp2(g_last) + tl.sum(b_kdk, 0)
        tl.store(dk + p_k, b_dk + b_dkg * b_e, mask=m_tk)
        b_dq *= b_e * scale
        b_q = tl.load(q + p_key, mask=m_tk, other=0.0)
        m_last = o_t == tl.minimum(BT, rows) - 1
        b_dg = b_q * b_dq - b_kdk + b_kg * b_dkg + tl.where(m_last[:, None], last[None, :], 0)
        tl.store(dq + p_k, b_dq, mask=m_tk)
        tl.store(dg + p_k, b_dg, mask=m_tk)
    m_tt = (o_t[:, None] > o_t[None, :]) & m_t[:, None]
    b_da = tl.where(m_tt, b_da * b_b[None, :], 0).to(b_a.dtype)
    b_da = tl.dot(b_da, b_a).to(b_a.dtype)
    b_da = tl.where(m_tt, -tl.dot(b_a, b_da), 0)
    tl.store(da + one * BT + o_t[:, None] * (HV * BT) + o_t[None, :], b_da, mask=m_t[:, None])
    tl.store(dbeta + one + o_t * HV, b_db, mask=m_t)


SHAPE = LaunchShape(block_k=32, block_v=64, num_warps=4, num_stages=3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelRows:
    """R rows in run order, 16 bits where nothing else is said. Shapes have fla's leading 1; HV is a multiple of H."""

    q: Tensor
    """[1, R, H, K] queries."""
    k: Tensor
    """[1, R, H, K] keys, normalised."""
    v: Tensor
    """[1, R, HV, V] values."""
    written: Tensor
    """[1, R, HV, V] what chunks write: values of the WY form less what the state before held."""
    g: Tensor
    """[1, R, HV, K] float32. log2-decays, cumulative within chunks."""
    beta: Tensor
    """[1, R, HV] write strengths, of any precision."""
    inverse: Tensor
    """[1, R, HV, C]. Inverse of the WY form of every chunk, a row a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelGradients:
    """Float32 but for `v`: what the gradient of products between tokens of a chunk is added to."""

    q: Tensor
    """[1, R, HV, K]."""
    k: Tensor
    """[1, R, HV, K]."""
    v: Tensor
    """[1, R, HV, V] in the dtype of the values; whole."""
    g: Tensor
    """[1, R, HV, K], of the cumulative decays (natural logarithms)."""
    beta: Tensor
    """[1, R, HV]."""
    products: Tensor
    """[1, R, HV, C], of `beta k k^T` under their decays below the diagonal, a row a token."""


def channel_gradients(
    rows: ChannelRows, do: Tensor, du: Tensor, states: ChunkStates, *, scale: float, launch: LaunchIndex
) -> ChannelGradients:
    """Gradients through the states and the WY form.

    Args:
        rows: R rows.
        do: [1, R, HV, V] gradients of the outputs, 16 bits.
        du: [1, R, HV, V] whole gradients of the written values, 16 bits.
        states: Of their chunks.
        scale: Of the queries.
        launch: Of the R rows.
    """
    num_key_heads, key_width = rows.k.shape[2:]
    num_heads, value_width = rows.v.shape[2:]
    found = ChannelGradients(
        q=torch.empty_like(rows.g),
        k=torch.empty_like(rows.g),
        v=torch.empty_like(rows.v),
        g=torch.empty_like(rows.g),
        beta=rows.g.new_empty(rows.beta.shape),
        products=rows.g.new_empty(rows.inverse.shape),
    )
    _gradients[(launch.slot_G.numel(), num_heads)](
        rows.q, rows.k, rows.v, rows.written, rows.g, rows.beta, rows.inverse, states.h, do, states.dh, du, found.q,
        found.k, found.v, found.g, found.beta, found.products, launch.cu_seqlens, launch.chunk_indices, scale,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size,
        BK=min(SHAPE.block_k or key_width, padded(key_width)), BV=min(SHAPE.block_v, padded(value_width)),
        num_warps=SHAPE.num_warps, num_stages=SHAPE.num_stages,
    )  # fmt: skip
    return found
