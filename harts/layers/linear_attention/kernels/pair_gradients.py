"""Gradients of products between tokens of a chunk whose decay differs by key channel (arXiv 2510.26692, section 3.1).

A decay a channel does not factor out of `q_i . k_j`: `exp2(g_i - g_j)` belongs to a pair of tokens and a channel. Split
at any token m between the two, though, it is `exp2(g_i - g_m) exp2(g_m - g_j)`, where neither factor is above 1,
however strong decays are. Between blocks of 16 tokens one m serves a block (Gated Linear Attention, arXiv 2312.06635,
section 4.3). Inside a block tokens are halved: pairs with one token in each half of it are split at the first token of
its second half, and those of one half are pairs of the halves of that. So four matrix products with masks take the
place of 256 pairs, and of fla's `chunk_kda_bwd_intra`, which forms them one by one.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.kernels.channel_gradients import ChannelGradients, ChannelRows
from harts.layers.linear_attention.kernels.chunks import rows_of_chunk
from harts.layers.linear_attention.kernels.queue import padded
from harts.layout.launch import LaunchIndex


@triton.jit
def _to_half(g, b_g, o_c, o_k, begin, rows, level, STRIDE: tl.constexpr, K: tl.constexpr):
    """Decay between each token of a block and the first of the second half that is next to it, and which pairs."""
    half = o_c >> level
    middle = begin + ((half | 1) << level)
    m_m = (middle < rows)[:, None] & (o_k < K)[None, :]
    b_gm = tl.load(g + middle[:, None] * STRIDE + o_k[None, :], mask=m_m, other=0.0)
    return tl.exp2(-tl.abs(b_g - b_gm)), (half[:, None] ^ half[None, :]) == 1


@triton.jit
def _gradients(
    q, k, g, beta, da_q, da_k, dq, dk, dg, db, cu_seqlens, chunk_indices, num_rows,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    NC: tl.constexpr = BT // BC
    begin = tl.program_id(0) % NC * BC
    i_k = tl.program_id(0) // NC % NK
    chunk = tl.program_id(0) // (NC * NK)
    head = tl.program_id(1)
    first, left = rows_of_chunk(chunk, cu_seqlens, chunk_indices, BT)
    rows = tl.minimum(left, BT).to(tl.int32)
    if begin >= rows:
        return
    o_c = tl.arange(0, BC)
    o_t = begin + o_c
    o_k = i_k * BK + tl.arange(0, BK)
    m_t, m_k = o_t < rows, o_k < K
    m_tk = m_t[:, None] & m_k[None, :]
    q += (first * H + head // (HV // H)) * K
    k += (first * H + head // (HV // H)) * K
    g += (first * HV + head) * K
    beta += first * HV + head
    da_q += (first * HV + head) * BT
    da_k += (first * HV + head) * BT
    b_g = tl.load(g + o_t[:, None] * (HV * K) + o_k[None, :], mask=m_tk, other=0.0)
    b_q = tl.load(q + o_t[:, None] * (H * K) + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    b_k = tl.load(k + o_t[:, None] * (H * K) + o_k[None, :], mask=m_tk, other=0.0).to(tl.float32)
    b_b = tl.load(beta + o_t * HV, mask=m_t, other=0.0).to(tl.float32)
    diagonal = tl.load(da_q + o_t * (HV * BT + 1), mask=m_t, other=0.0)

    # As keys: of later blocks, split at the last token of this one, and of later tokens of this block.
    b_dkt = tl.zeros([BC, BK], dtype=tl.float32)
    if begin + BC < rows:
        g_last = tl.load(g + (begin + BC - 1) * (HV * K) + o_k, mask=m_k, other=0.0)
        for j in range(begin + BC, rows, BC):
            o_j = j + o_c
            m_j = o_j < rows
            m_jk = m_j[:, None] & m_k[None, :]
            b_gj = tl.load(g + o_j[:, None] * (HV * K) + o_k[None, :], mask=m_jk, other=0.0)
            b_qj = tl.load(q + o_j[:, None] * (H * K) + o_k[None, :], mask=m_jk, other=0.0)
            b_kj = tl.load(k + o_j[:, None] * (H * K) + o_k[None, :], mask=m_jk, other=0.0)
            b_bj = tl.load(beta + o_j * HV, mask=m_j, other=0.0).to(tl.float32)
            b_ej = tl.where(m_j[:, None], tl.exp2(b_gj - g_last[None, :]), 0.0)
            p_a = o_t[:, None] + o_j[None, :] * (HV * BT)
            b_dkt = tl.dot(tl.load(da_q + p_a, mask=m_j[None, :], other=0.0), b_qj * b_ej, b_dkt)
            b_dkt = tl.dot(tl.load(da_k + p_a, mask=m_j[None, :], other=0.0), b_kj * b_bj[:, None] * b_ej, b_dkt)
        b_dkt *= tl.exp2(g_last[None, :] - b_g)
    p_a = o_t[:, None] + o_t[None, :] * (HV * BT)
    b_aq = tl.load(da_q + p_a, mask=m_t[None, :], other=0.0)
    b_ak = tl.load(da_k + p_a, mask=m_t[None, :], other=0.0)
    b_dkt += diagonal[:, None] * b_q
    for level in range(LEVELS):
        b_e, pairs = _to_half(g, b_g, o_c, o_k, begin, rows, level, HV * K, K)
        pairs = pairs & (o_c[:, None] < o_c[None, :])
        b_x = tl.dot(tl.where(pairs, b_aq, 0.0), b_q * b_e)
        b_x = tl.dot(tl.where(pairs, b_ak, 0.0), b_k * (b_b[:, None] * b_e), b_x)
        b_dkt += b_x * b_e
    tl.debug_barrier()

    # As queries: of earlier blocks, split at the first token of this one, and of earlier tokens of this block.
    b_dq = tl.zeros([BC, BK], dtype=tl.float32)
    b_dk = tl.zeros([BC, BK], dtype=tl.float32)
    if begin > 0:
        g_first = tl.load(g + begin * (HV * K) + o_k, mask=m_k, other=0.0)
        for j in range(0, begin, BC):
            o_j = j + o_c
            b_kj = tl.load(k + o_j[:, None] * (H * K) + o_k[None, :], mask=m_k[None, :], other=0.0)
            b_gj = tl.load(g + o_j[:, None] * (HV * K) + o_k[None, :], mask=m_k[None, :], other=0.0)
            b_ke = b_kj * tl.exp2(g_first[None, :] - b_gj)
            p_a = o_t[:, None] * (HV * BT) + o_j[None, :]
            b_dq = tl.dot(tl.load(da_q + p_a, mask=m_t[:, None], other=0.0), b_ke, b_dq)
            b_dk = tl.dot(tl.load(da_k + p_a, mask=m_t[:, None], other=0.0), b_ke, b_dk)
        b_e = tl.exp2(b_g - g_first[None, :])
        b_dq *= b_e
        b_dk *= b_e
    p_a = o_t[:, None] * (HV * BT) + o_t[None, :]
    b_aq = tl.load(da_q + p_a, mask=m_t[:, None], other=0.0)
    b_ak = tl.load(da_k + p_a, mask=m_t[:, None], other=0.0)
    b_dq += diagonal[:, None] * b_k
    for level in range(LEVELS):
        b_e, pairs = _to_half(g, b_g, o_c, o_k, begin, rows, level, HV * K, K)
        pairs = pairs & (o_c[:, None] > o_c[None, :])
        b_ke = b_k * b_e
        b_dq += tl.dot(tl.where(pairs, b_aq, 0.0), b_ke) * b_e
        b_dk += tl.dot(tl.where(pairs, b_ak, 0.0), b_ke) * b_e

    p_b = (i_k.to(tl.int64) * num_rows + first + o_t) * HV + head
    tl.store(db + p_b, tl.sum(b_dk * b_k, 1), mask=m_t)
    b_dk *= b_b[:, None]
    p_k = (first * HV + head) * K + o_t[:, None] * (HV * K) + o_k[None, :]
    b_dg = b_q * b_dq + (b_dk - b_dkt) * b_k + tl.load(dg + p_k, mask=m_tk, other=0.0)
    tl.store(dg + p_k, b_dg, mask=m_tk)
    tl.store(dq + p_k, b_dq + tl.load(dq + p_k, mask=m_tk, other=0.0), mask=m_tk)
    tl.store(dk + p_k, b_dk + b_dkt + tl.load(dk + p_k, mask=m_tk, other=0.0), mask=m_tk)


BLOCK = 16
"""Tokens of a block: the least that a matrix product takes."""
BLOCK_K, NUM_WARPS, NUM_STAGES = 64, 2, 2
"""Key channels of a program's tile, and how it runs; results hardly depend on it."""


def pair_gradients(
    rows: ChannelRows, products: Tensor, found: ChannelGradients, *, launch: LaunchIndex
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a chunk's products between tokens, added to all others.

    Args:
        rows: R rows.
        products: [1, R, HV, C] float32 gradients of `q k^T` under their decays, a row a token; zero above the diagonal.
        found: The others, with the gradients of `beta k k^T`. Those of queries, keys and decays are added to in place.
        launch: Of the R rows.

    Returns:
        Float32: dq and dk [1, R, HV, K], write strengths [1, R, HV], and cumulative decays (natural logarithms)
        [1, R, HV, K].
    """
    num_rows, num_key_heads, key_width = rows.k.shape[1:]
    num_heads, chunk_size = products.shape[2:]
    block = min(BLOCK, chunk_size)
    block_k = min(BLOCK_K, padded(key_width))
    tiles = triton.cdiv(key_width, block_k)
    dbeta = found.beta.new_empty(tiles, num_rows, num_heads)
    _gradients[(tiles * (chunk_size // block) * launch.slot_G.numel(), num_heads)](
        rows.q, rows.k, rows.g, rows.beta, products, found.products, found.q, found.k, found.g, dbeta,
        launch.cu_seqlens, launch.chunk_indices, num_rows,
        H=num_key_heads, HV=num_heads, K=key_width, BT=chunk_size, BC=block, BK=block_k,
        LEVELS=block.bit_length() - 1, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return found.q, found.k, dbeta.sum(0, keepdim=True).add_(found.beta), found.g
