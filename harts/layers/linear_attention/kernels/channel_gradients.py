"""Gradients through products inside chunks of Kimi Delta Attention, whose decays differ by key channel.

A chunk multiplies queries and keys by `A_ij = sum_c q_ic k_jc exp(g_ic - g_jc)`, i >= j, and keys with keys alike
(arXiv 2510.26692, section 3). Decays have no lower bound, so that `exp(g_i) exp(-g_j)` may overflow: like in fla's
`chunk_kda_bwd_intra` (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li and contributors), pairs of rows in different blocks of
16 are taken from a row between them, by matrix products, and pairs in one block one by one. Unlike there, a program
takes all blocks of a chunk, all pairs of a block at once, and each exponential of a pair serves both of its rows.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.kernels.queue import LaunchShape, padded
from harts.layout.launch import LaunchIndex

BLOCK = 16
"""Rows whose pairs are taken one by one: the least that a matrix product takes."""


@triton.jit
def _gradients(
    q, k, g, beta, da_q, da_k, dq, dk, dg, dbeta, cu_seqlens, chunk_indices, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    i_k = tl.program_id(0) % NK
    chunk = (tl.program_id(0) // NK).to(tl.int64)
    head = tl.program_id(1)
    run = tl.load(chunk_indices + chunk * 2)
    first = tl.load(cu_seqlens + run).to(tl.int64) + tl.load(chunk_indices + chunk * 2 + 1) * BT
    rows = tl.minimum(tl.load(cu_seqlens + run + 1) - first, BT).to(tl.int32)

    o_k = i_k * BK + tl.arange(0, BK)
    m_k = o_k < K
    o_a, o_c = tl.arange(0, BT), tl.arange(0, BC)
    m_a = o_a < rows
    m_ak = m_a[:, None] & m_k[None, :]
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    g += (first * HV + head) * K
    one = first * HV + head
    p_ak = o_a[:, None] * (H * K) + o_k[None, :]
    p_ag = o_a[:, None] * (HV * K) + o_k[None, :]
    for begin in range(0, rows, BC):
        o_t = begin + o_c
        m_t = o_t < rows
        m_tk = m_t[:, None] & m_k[None, :]
        b_q = tl.load(q + o_t[:, None] * (H * K) + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_k = tl.load(k + o_t[:, None] * (H * K) + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
        b_g = tl.load(g + o_t[:, None] * (HV * K) + o_k[None, :], mask=m_tk, other=0.0)
        b_b = tl.load(beta + one + o_t * HV, mask=m_t, other=0.0).to(tl.float32)

        # As the later row of a pair, with rows before the block.
        before = m_t[:, None] & (o_a < begin)[None, :]
        p_a = one * BT + o_t[:, None] * (HV * BT) + o_a[None, :]
        b_aq = tl.load(da_q + p_a, mask=before, other=0.0).to(tl.float32)
        b_ak = tl.load(da_k + p_a, mask=before, other=0.0).to(tl.float32)
        # Read again for every block: kept, they would take the registers of pairs.
        a_k = tl.load(k + p_ak, mask=m_ak, other=0.0).to(tl.float32)
        a_g = tl.load(g + p_ag, mask=m_ak, other=0.0)
        g_first = tl.load(g + begin * (HV * K) + o_k, mask=m_k, other=0.0)
        a_decayed = a_k * tl.exp2(tl.minimum(g_first[None, :] - a_g, 0))
        decay = tl.exp2(tl.minimum(b_g - g_first[None, :], 0))
        b_dq = tl.dot(b_aq, a_decayed) * decay
        b_dkb = tl.dot(b_ak, a_decayed) * decay
        # As the earlier row, with rows after the block.
        after = (o_a[None, :] >= begin + BC) & m_a[None, :]
        p_a = one * BT + o_a[None, :] * (HV * BT) + o_t[:, None]
        b_aq = tl.load(da_q + p_a, mask=after, other=0.0).to(tl.float32)
        b_ak = tl.load(da_k + p_a, mask=after, other=0.0).to(tl.float32)
        a_q = tl.load(q + p_ak, mask=m_ak, other=0.0).to(tl.float32)
        a_b = tl.load(beta + one + o_a * HV, mask=m_a, other=0.0).to(tl.float32)
        g_last = tl.load(g + (tl.minimum(begin + BC, rows) - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        a_decay = tl.exp2(tl.minimum(a_g - g_last[None, :], 0))
        b_dk = tl.dot(b_aq, a_q * a_decay)
        b_dk = tl.dot(b_ak, a_k * a_decay * a_b[:, None], b_dk)
        b_dk *= tl.exp2(tl.minimum(g_last[None, :] - b_g, 0))
        # With rows of the block. Barriers keep loads, and with them registers, from moving up.
        tl.debug_barrier()
        pairs = (o_t[:, None] >= o_t[None, :]) & m_t[:, None]
        p_a = one * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
        decay = tl.exp2(tl.minimum(b_g[:, None, :] - b_g[None, :, :], 0))
        b_a = tl.load(da_q + p_a, mask=pairs, other=0.0).to(tl.float32)[:, :, None] * decay
        b_dk += tl.sum(b_a * b_q[:, None, :], 0)
        b_dq += tl.sum(b_a * b_k[None, :, :], 1)
        tl.debug_barrier()
        b_a = tl.load(da_k + p_a, mask=pairs, other=0.0).to(tl.float32)[:, :, None] * decay
        b_dk += tl.sum(b_a * (b_k * b_b[:, None])[:, None, :], 0)
        b_dkb += tl.sum(b_a * b_k[None, :, :], 1)

        tl.store(dbeta + i_k.to(tl.int64) * num_rows * HV + one + o_t * HV, tl.sum(b_dkb * b_k, 1), mask=m_t)
        b_dkb *= b_b[:, None]
        p_k = one * K + o_t[:, None] * (HV * K) + o_k[None, :]
        b_dg = b_dq * b_q + (b_dkb - b_dk) * b_k + tl.load(dg + p_k, mask=m_tk, other=0.0)
        tl.store(dg + p_k, b_dg, mask=m_tk)
        tl.store(dq + p_k, tl.load(dq + p_k, mask=m_tk, other=0.0) + b_dq, mask=m_tk)
        tl.store(dk + p_k, tl.load(dk + p_k, mask=m_tk, other=0.0) + b_dkb + b_dk, mask=m_tk)


SHAPE = LaunchShape(block_k=32, block_v=0, num_warps=4, num_stages=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelRows:
    """R rows in run order of a layer with a decay a key channel. Shapes have fla's leading 1; HV is a multiple of H."""

    q: Tensor
    """[1, R, H, K] queries, 16 bits."""
    k: Tensor
    """[1, R, H, K] keys, 16 bits."""
    g: Tensor
    """[1, R, HV, K] float32. log2-decays, cumulative within chunks."""
    beta: Tensor
    """[1, R, HV] write strengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelGradients:
    """Gradients so far, float32, to which those through products inside chunks are added in place."""

    dq: Tensor
    """[1, R, HV, K] of the queries of every value head."""
    dk: Tensor
    """[1, R, HV, K] of the keys of every value head."""
    dg: Tensor
    """[1, R, HV, K] of the cumulative decays (natural logarithms)."""
    dbeta: Tensor
    """[1, R, HV] of the write strengths."""


def add_channel_gradients(
    into: ChannelGradients, rows: ChannelRows, da_q: Tensor, da_k: Tensor, *, launch: LaunchIndex
) -> None:
    """Add the gradients through products of queries and keys, and of keys with keys, inside chunks.

    Args:
        into: Of the same rows; changed.
        rows: R rows.
        da_q: [1, R, HV, C] gradients of the products of queries and keys, a row a query.
        da_k: [1, R, HV, C] the same of keys and keys, before write strengths.
        launch: Of the R rows. Its chunk size C is a multiple of 16.
    """
    num_rows, num_key_heads, key_width = rows.q.shape[1:]
    num_heads = rows.g.shape[2]
    block_k = min(SHAPE.block_k or key_width, padded(key_width))
    tiles = triton.cdiv(key_width, block_k)
    dbeta = torch.empty(tiles, num_rows, num_heads, dtype=torch.float32, device=rows.g.device)
    _gradients[(tiles * launch.slot_G.numel(), num_heads)](
        rows.q, rows.k, rows.g, rows.beta, da_q, da_k, into.dq, into.dk, into.dg, dbeta, launch.cu_seqlens,
        launch.chunk_indices, num_rows,
        H=num_key_heads, HV=num_heads, K=key_width, BT=launch.chunk_size, BK=block_k, BC=BLOCK,
        num_warps=SHAPE.num_warps, num_stages=SHAPE.num_stages, maxnreg=SHAPE.max_registers,
    )  # fmt: skip
    into.dbeta.add_(dbeta.sum(0))
