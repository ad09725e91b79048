"""The states of linear attention with scalar decays over a whole tree, in one launch each way.

What is sequential in simple gated linear attention, lightning attention (arXiv 2401.04658) and Mamba2's SSD (arXiv
2405.21060): the state before every chunk, and backward the gradient of the state after it. There is no delta rule, so
tiles of a state do not ask for each other, and the state's keys are cut as its values are.

The arithmetic is that of fla's `chunk_fwd_h` and `chunk_bwd_dh` (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li and
contributors), step by step, so that states are those of each path run alone, bit for bit. Rows past the end of a run
are left out before their decay is taken: fla multiplies them by zero, which is not zero where the decay back from
there overflows (constant decays below -1.4 in chunks of 64, below -0.35 in chunks of 256).
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false, reportOperatorIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from harts.layers.linear_attention.kernels.queue import (
    LaunchShape,
    add_gradients,
    add_start_state,
    backward_queue,
    hand_back,
    hand_over,
    padded,
    resident_programs,
    spread,
    take_work,
    ticket_and_flags,
)
from harts.layout.launch import LaunchIndex


@triton.jit
def _forward(
    k, v, g, gamma, h, states, slot_of_chunk, queue, flags, ticket,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, USE_G: tl.constexpr, USE_GAMMA: tl.constexpr, SPREAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    TILES: tl.constexpr = NK * ((V + BV - 1) // BV)
    _, i_h, i_tile, begin, rows, first_chunk, start = take_work(ticket, queue, HV, TILES, SPREAD)
    o_k = (i_tile % NK) * BK + tl.arange(0, BK)
    o_v = (i_tile // NK) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    tile = o_k[:, None] * V + o_v[None, :]

    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    states += i_h * K * V
    flags += i_h * TILES + i_tile
    if start >= 0:
        b_h = add_start_state(b_h, states + start * HV * K * V + tile, m_kv, flags + start * HV * TILES)

    k += (begin * H + i_h // (HV // H)) * K
    v += (begin * HV + i_h) * V
    if USE_G:
        g += begin * HV + i_h
    if USE_GAMMA:
        b_gamma = tl.load(gamma + i_h)
        b_g = b_gamma * (tl.arange(0, BT) + 1)
    # What is not a tile is not copied ahead with the tiles: it is read one chunk early here.
    slot = tl.load(slot_of_chunk + first_chunk)
    last = tl.cdiv(rows, BT) - 1
    if USE_G:
        g_last = tl.load(g + (BT - 1) * HV, mask=last > 0, other=0.0)
    # The state after the last chunk, which alone may not be full, is nobody's: it is not worked out.
    for i in range(last):
        done = tl.cast(i, tl.int64) * BT
        next_slot = tl.load(slot_of_chunk + first_chunk + i + 1)
        if USE_G:
            next_g_last = tl.load(g + (done + 2 * BT - 1) * HV, mask=i + 1 < last, other=0.0)
        tl.store(h + ((first_chunk + i) * HV + i_h) * K * V + tile, b_h.to(h.dtype.element_ty), mask=m_kv)
        hand_over(b_h, slot, states + tile, flags, m_kv, HV * K * V, HV * TILES, INTERPRETED)

        o_t = done + tl.arange(0, BT)
        b_k = tl.load(k + o_k[:, None] + o_t[None, :] * (H * K), mask=m_k[:, None], other=0.0)
        b_v = tl.load(v + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_v[None, :], other=0.0)
        if USE_G:
            b_g = tl.load(g + o_t * HV)
        if USE_GAMMA:
            # Not before the loop, where the compiler would fuse it with what makes b_g, and round otherwise than fla.
            g_last = b_gamma * tl.minimum(BT, rows - i * BT)
        if USE_G or USE_GAMMA:
            b_h *= tl.exp2(g_last)
            b_v = (b_v * tl.exp2(g_last - b_g)[:, None]).to(b_v.dtype)
        b_h = tl.dot(b_k, b_v, b_h)
        slot = next_slot
        if USE_G:
            g_last = next_g_last
    tl.store(h + ((first_chunk + last) * HV + i_h) * K * V + tile, b_h.to(h.dtype.element_ty), mask=m_kv)
    hand_over(b_h, slot, states + tile, flags, m_kv, HV * K * V, HV * TILES, INTERPRETED)


@triton.jit
def _backward(
    q, g, gamma, do, dh, start_gradients, slot_of_chunk, queue, slot_offsets, slot_runs, counts, ticket, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, USE_G: tl.constexpr, USE_GAMMA: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    NK: tl.constexpr = (K + BK - 1) // BK
    TILES: tl.constexpr = NK * ((V + BV - 1) // BV)
    run, i_h, i_tile, begin, rows, first_chunk, start = take_work(ticket, queue, HV, TILES, SPREAD)
    o_k = (i_tile % NK) * BK + tl.arange(0, BK)
    o_v = (i_tile // NK) * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    tile = o_k[:, None] * V + o_v[None, :]

    q += (begin * H + i_h // (HV // H)) * K
    do += (begin * HV + i_h) * V
    if USE_G:
        g += begin * HV + i_h
    if USE_GAMMA:
        b_gamma = tl.load(gamma + i_h)
        b_g = b_gamma * (tl.arange(0, BT) + 1)
    last = tl.cdiv(rows, BT) - 1
    # Of the last chunk, which alone may not be full: nothing comes from behind it.
    o_t = tl.cast(last, tl.int64) * BT + tl.arange(0, BT)
    m_t = o_t < rows
    b_dh = tl.zeros([BK, BV], dtype=tl.float32)
    tl.store(dh + ((first_chunk + last) * HV + i_h) * K * V + tile, b_dh.to(dh.dtype.element_ty), mask=m_kv)
    e_q = tl.load(q + o_k[:, None] + o_t[None, :] * (H * K), mask=m_k[:, None] & m_t[None, :], other=0.0)
    e_do = tl.load(do + o_t[:, None] * (HV * V) + o_v[None, :], mask=m_t[:, None] & m_v[None, :], other=0.0)
    e_q = (e_q * scale).to(e_q.dtype)
    if USE_G:
        e_q = (e_q * tl.exp2(tl.load(g + o_t * HV, mask=m_t, other=0.0))[None, :]).to(e_q.dtype)
    if USE_GAMMA:
        e_q = (e_q * tl.exp2(b_g)[None, :]).to(e_q.dtype)
        g_last = b_gamma * BT
    b_dh = tl.dot(e_q, e_do.to(e_q.dtype))

    slot = tl.load(slot_of_chunk + first_chunk + last)
    if USE_G:
        g_last = tl.load(g + (tl.cast(last, tl.int64) * BT - 1) * HV, mask=last > 0, other=0.0)
    for back in range(1, last + 1):
        i = last - back
        done = tl.cast(i, tl.int64) * BT
        if slot >= 0:
            count = counts + (tl.cast(slot, tl.int64) * HV + i_h) * TILES + i_tile
            p_d = start_gradients + i_h * K * V + tile
            b_dh = add_gradients(b_dh, p_d, m_kv, HV * K * V, slot, slot_offsets, slot_runs, count)
        # What is not a tile is not copied ahead with the tiles: it is read one chunk early here.
        slot = tl.load(slot_of_chunk + first_chunk + i)
        if USE_G:
            next_g_last = tl.load(g + (done - 1) * HV, mask=i > 0, other=0.0)
        tl.store(dh + ((first_chunk + i) * HV + i_h) * K * V + tile, b_dh.to(dh.dtype.element_ty), mask=m_kv)

        r_t = done + tl.arange(0, BT)
        b_q = tl.load(q + o_k[:, None] + r_t[None, :] * (H * K), mask=m_k[:, None], other=0.0)
        b_do = tl.load(do + r_t[:, None] * (HV * V) + o_v[None, :], mask=m_v[None, :], other=0.0)
        b_q = (b_q * scale).to(b_q.dtype)
        if USE_G:
            b_g = tl.load(g + r_t * HV)
        if USE_G or USE_GAMMA:
            b_q = (b_q * tl.exp2(b_g)[None, :]).to(b_q.dtype)
            b_dh *= tl.exp2(g_last)
        b_dh = tl.dot(b_q, b_do.to(b_q.dtype), b_dh)
        if USE_G:
            g_last = next_g_last

    if start >= 0:
        p_d = start_gradients + (run * HV + i_h) * K * V + tile
        hand_back(b_dh, p_d, m_kv, counts + (start * HV + i_h) * TILES + i_tile)


FORWARD = LaunchShape(block_k=64, block_v=64, num_warps=4, num_stages=3, spread=True)
BACKWARD = LaunchShape(block_k=64, block_v=64, num_warps=4, num_stages=3, spread=True)
SHARED_BYTES = 60 * 1024
"""Shared memory of a backward program at most; tests compile them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkDecay:
    """Log2-decays of the state. Without either, the state forgets nothing."""

    g: Tensor | None = None
    """[1, R, HV] float32, cumulative within chunks."""
    gamma: Tensor | None = None
    """[HV] float32. Of one token, the same for all tokens."""


def tree_states(k: Tensor, v: Tensor, decay: ChunkDecay, *, launch: LaunchIndex, dtype: torch.dtype) -> Tensor:
    """The state before every chunk.

    Args:
        k: [1, R, H, K] keys of R rows in run order.
        v: [1, R, HV, V] values; HV is a multiple of H.
        decay: Of the same rows.
        launch: Of the R rows.
        dtype: Of what is returned. States are added up and handed over in float32 in any case.

    Returns:
        h [1, G, HV, K, V].
    """
    num_key_heads, key_width = k.shape[2:]
    num_heads, value_width = v.shape[2:]
    shape = FORWARD
    blocks = _blocks(shape, key_width, value_width)
    work = num_heads * triton.cdiv(key_width, blocks["BK"]) * triton.cdiv(value_width, blocks["BV"])
    h = k.new_empty(1, launch.slot_G.numel(), num_heads, key_width, value_width, dtype=dtype)
    states = h.new_empty(launch.num_slots, num_heads, key_width, value_width, dtype=torch.float32)
    ticket, flags = ticket_and_flags(launch.num_slots * work, k.device)
    _forward[(launch.num_runs * work,)](
        k, v, decay.g, decay.gamma, h, states, launch.slot_G, launch.forward_queue, flags, ticket,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, **blocks,
        USE_G=decay.g is not None, USE_GAMMA=decay.gamma is not None, SPREAD=spread(shape, k.device),
        INTERPRETED=triton.knobs.runtime.interpret, num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return h


def tree_state_gradients(
    q: Tensor, do: Tensor, decay: ChunkDecay, *, scale: float, launch: LaunchIndex, dtype: torch.dtype
) -> Tensor:
    """The gradient of the state after every chunk.

    Args:
        q: [1, R, H, K] queries of R rows in run order.
        do: [1, R, HV, V] gradients of the outputs.
        decay: Of the same rows.
        scale: Of the queries.
        launch: Of the R rows.
        dtype: Of what is returned.

    Returns:
        dh [1, G, HV, K, V].
    """
    num_key_heads, key_width = q.shape[2:]
    num_heads, value_width = do.shape[2:]
    shape = BACKWARD
    blocks = _blocks(shape, key_width, value_width)
    work = num_heads * triton.cdiv(key_width, blocks["BK"]) * triton.cdiv(value_width, blocks["BV"])
    dh = q.new_empty(1, launch.slot_G.numel(), num_heads, key_width, value_width, dtype=dtype)
    start_gradients = dh.new_empty(launch.num_runs, num_heads, key_width, value_width, dtype=torch.float32)
    ticket, counts = ticket_and_flags(launch.num_slots * work, q.device)
    resident = resident_programs(shape.num_warps, SHARED_BYTES, q.device)
    queue = backward_queue(launch, work, q.device, resident=resident)
    _backward[(launch.num_runs * work,)](
        q, decay.g, decay.gamma, do, dh, start_gradients, launch.slot_G, queue,
        launch.slot_offsets, launch.slot_runs, counts, ticket, scale,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, **blocks,
        USE_G=decay.g is not None, USE_GAMMA=decay.gamma is not None, SPREAD=spread(shape, q.device),
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return dh


def _blocks(shape: LaunchShape, key_width: int, value_width: int) -> dict[str, int]:
    assert shape.block_k is not None
    return {"BK": min(shape.block_k, padded(key_width)), "BV": min(shape.block_v, padded(value_width))}
