"""Gradients through the WY form of Gated DeltaNet inside chunks (arXiv 2412.06464, section 3.3).

Parallel over chunks. What fla's `prepare_wy_repr_bwd` computes (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li and
contributors); here a program takes all value heads of a key head, so that keys are read once and their gradient leaves
summed over heads, together with what it was before.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
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
    k, v, beta, g, inverse, dw, du, dk, dv, dbeta, dg, cu_seqlens, chunk_indices,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    chunk = tl.program_id(0)
    i_h = tl.program_id(1)
    first, left = rows_of_chunk(chunk, cu_seqlens, chunk_indices, BT)
    rows = left.to(tl.int32)

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m_t = o_t < rows
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    m_tt = (o_t[:, None] > o_t[None, :]) & m_t[:, None]
    row_k = (first * H + i_h) * K + o_t[:, None] * (H * K) + o_k[None, :]
    sum_dk = tl.load(dk + row_k, mask=m_tk, other=0.0).to(tl.float32)
    for head in range(i_h * (HV // H), (i_h + 1) * (HV // H)):
        one = first * HV + head + o_t * HV
        b_b = tl.load(beta + one, mask=m_t, other=0.0).to(tl.float32)
        b_g = tl.load(g + one, mask=m_t, other=0.0)
        b_e = tl.exp2(b_g)
        # Transposed: rows of the inverse are columns here.
        p_a = (first * HV + head) * BT + o_t[:, None] + o_t[None, :] * (HV * BT)
        b_a = tl.load(inverse + p_a, mask=m_t[None, :], other=0.0)

        b_da = tl.zeros([BT, BT], dtype=tl.float32)
        b_db = tl.zeros([BT], dtype=tl.float32)
        for i_v in range(NV):
            o_v = i_v * BV + tl.arange(0, BV)
            m_tv = m_t[:, None] & (o_v < V)[None, :]
            p_v = (first * HV + head) * V + o_t[:, None] * (HV * V) + o_v[None, :]
            b_v = tl.load(v + p_v, mask=m_tv, other=0.0)
            b_du = tl.load(du + p_v, mask=m_tv, other=0.0)
            b_da = tl.dot(b_du, tl.trans((b_v * b_b[:, None]).to(b_v.dtype)), b_da)
            b_dvb = tl.dot(b_a, b_du)
            b_db += tl.sum(b_dvb * b_v, 1)
            tl.store(dv + p_v, (b_dvb * b_b[:, None]).to(dv.dtype.element_ty), mask=m_tv)

        p_w = (first * HV + head) * K + o_t[:, None] * (HV * K) + o_k[None, :]
        b_k = tl.load(k + row_k, mask=m_tk, other=0.0)
        b_dw = tl.load(dw + p_w, mask=m_tk, other=0.0)
        b_da = tl.dot(b_dw, tl.trans((b_k * (b_b * b_e)[:, None]).to(b_k.dtype)), b_da)
        b_dkw = tl.dot(b_a, b_dw) * b_e[:, None]
        b_of_k = tl.sum(b_dkw * b_k, 1)
        b_db += b_of_k
        sum_dk += b_dkw * b_b[:, None]
        b_da = tl.where(m_tt, b_da, 0).to(b_a.dtype)
        b_da = tl.dot(b_da, b_a).to(b_a.dtype)
        b_da = tl.dot(b_a, b_da) * tl.exp2(b_g[:, None] - b_g[None, :])
        b_da = tl.where(m_tt, -b_da, 0).to(b_k.dtype)
        tl.debug_barrier()
        b_k = tl.load(k + row_k, mask=m_tk, other=0.0)
        b_kb = (b_k * b_b[:, None]).to(b_k.dtype)
        b_products = b_da * tl.dot(b_kb, tl.trans(b_k))
        b_dg = b_of_k * b_b + tl.sum(b_products, 1) - tl.sum(b_products, 0)
        tl.store(dg + one, b_dg, mask=m_t)
        sum_dk = tl.dot(tl.trans(b_da), b_kb, sum_dk)
        b_dkb = tl.dot(b_da, b_k)
        b_db += tl.sum(b_dkb * b_k, 1)
        tl.store(dbeta + one, b_db.to(dbeta.dtype.element_ty), mask=m_t)
        sum_dk += b_dkb * b_b[:, None]
    tl.store(dk + row_k, sum_dk.to(dk.dtype.element_ty), mask=m_tk)


SHAPE = LaunchShape(block_v=64, num_warps=4, num_stages=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class WYRows:
    """R rows in run order of a layer with a WY form. Shapes have fla's leading 1; HV is a multiple of H."""

    k: Tensor
    """[1, R, H, K] keys, normalised, 16 bits."""
    v: Tensor
    """[1, R, HV, V] values, 16 bits."""
    beta: Tensor
    """[1, R, HV] write strengths."""
    g: Tensor
    """[1, R, HV] float32. log2-decays, cumulative within chunks."""
    inverse: Tensor
    """[1, R, HV, C] 16 bits. `(I + tril(beta exp(g_i - g_j) k k^T, -1))^-1` of every chunk, a row a token."""


def wy_gradients(
    rows: WYRows, dw: Tensor, du: Tensor, dk: Tensor, *, launch: LaunchIndex
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of what the WY form is made of.

    Args:
        rows: R rows.
        dw: [1, R, HV, K] gradients of its keys.
        du: [1, R, HV, V] gradients of its values.
        dk: [1, R, H, K] gradients of the keys so far; those through the WY form are added in place.
        launch: Of the R rows.

    Returns:
        Gradients of values [1, R, HV, V], write strengths [1, R, HV] and cumulative decays (natural logarithms)
        [1, R, HV] float32.
    """
    num_key_heads, key_width = rows.k.shape[2:]
    num_heads, value_width = rows.v.shape[2:]
    dv, dbeta, dg = torch.empty_like(rows.v), torch.empty_like(rows.beta), torch.empty_like(rows.g)
    _gradients[(launch.slot_G.numel(), num_key_heads)](
        rows.k, rows.v, rows.beta, rows.g, rows.inverse, dw, du, dk, dv, dbeta, dg, launch.cu_seqlens,
        launch.chunk_indices,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, BK=padded(key_width),
        BV=min(SHAPE.block_v, padded(value_width)), num_warps=SHAPE.num_warps, num_stages=SHAPE.num_stages,
    )  # fmt: skip
    return dv, dbeta, dg
