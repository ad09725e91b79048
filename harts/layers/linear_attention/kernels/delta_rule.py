"""The states of the delta rule over a whole tree, in one launch each way.

What is sequential in chunked Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692): the state
before every chunk, and backward the gradient of the state after it. Everything else is parallel over chunks and does
not ask which chunk comes before which.

The arithmetic is that of fla's `chunk_gated_delta_rule_fwd_h` and `_bwd_dhu` (MIT, Songlin Yang, Yu Zhang, Zhiyuan Li
and contributors), step by step, so that states are those of each path run alone, bit for bit.

Programs take (run, head, block of values) from a queue (`queue.py`).
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from collections.abc import Mapping
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
    multiprocessors,
    padded,
    spread,
    take_work,
    ticket_and_flags,
)
from harts.layout.launch import LaunchIndex


@triton.jit
def _forward(
    k, u, w, v_new, g, gk, h, states, slot_of_chunk, queue, flags, ticket,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr, SAVE: tl.constexpr,
    SPREAD: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    _, i_h, i_v, begin, rows, first_chunk, start = take_work(ticket, queue, HV, NV, SPREAD)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    tile = o_k[:, None] * V + o_v[None, :]

    b_h = tl.zeros([BK, BV], dtype=tl.float32)
    states += i_h * K * V
    flags += i_h * NV + i_v
    if start >= 0:
        b_h = add_start_state(b_h, states + start * HV * K * V + tile, m_kv, flags + start * HV * NV)

    o_t = tl.arange(0, BT)
    row_k = o_t[:, None] * (HV * K) + o_k[None, :]
    row_v = o_t[:, None] * (HV * V) + o_v[None, :]
    column_k = o_k[:, None] + o_t[None, :] * (H * K)
    u += (begin * HV + i_h) * V
    w += (begin * HV + i_h) * K
    k += (begin * H + i_h // (HV // H)) * K
    if SAVE:
        v_new += (begin * HV + i_h) * V
    if USE_G:
        g += begin * HV + i_h
    if USE_GK:
        gk += (begin * HV + i_h) * K
    # What is not a tile is not copied ahead with the tiles: it is read one chunk early here.
    slot = tl.load(slot_of_chunk + first_chunk)
    last = tl.cdiv(rows, BT) - 1
    g_last = tl.load(g + (BT - 1) * HV, mask=last > 0, other=0.0) if USE_G else 0.0
    gk_last = tl.load(gk + (BT - 1) * (HV * K) + o_k, mask=m_k & (last > 0), other=0.0) if USE_GK else 0.0
    # The state after the last chunk, which alone may not be full, is nobody's: it is not worked out.
    for i in range(last):
        done = tl.cast(i, tl.int64) * BT
        more = i + 1 < last
        next_slot = tl.load(slot_of_chunk + first_chunk + i + 1)
        if USE_G:
            next_g_last = tl.load(g + (done + 2 * BT - 1) * HV, mask=more, other=0.0)
        if USE_GK:
            next_gk_last = tl.load(gk + (done + 2 * BT - 1) * (HV * K) + o_k, mask=m_k & more, other=0.0)
        tl.store(h + ((first_chunk + i) * HV + i_h) * K * V + tile, b_h.to(h.dtype.element_ty), mask=m_kv)
        hand_over(b_h, slot, states + tile, flags, m_kv, HV * K * V, HV * NV, INTERPRETED)

        b_w = tl.load(w + done * (HV * K) + row_k, mask=m_k[None, :], other=0.0)
        b_v = tl.load(u + done * (HV * V) + row_v, mask=m_v[None, :], other=0.0) - tl.dot(b_w, b_h.to(b_w.dtype))
        if SAVE:
            tl.store(v_new + done * (HV * V) + row_v, b_v.to(v_new.dtype.element_ty), mask=m_v[None, :])

        if USE_G:
            b_g = tl.load(g + done * HV + o_t * HV)
            b_v = b_v * tl.exp2(g_last - b_g)[:, None]
            b_h *= tl.exp2(g_last)
            g_last = next_g_last
        if USE_GK:
            b_h *= tl.exp2(gk_last)[:, None]
            gk_last = next_gk_last
        b_k = tl.load(k + done * (H * K) + column_k, mask=m_k[:, None], other=0.0)
        b_h = tl.dot(b_k, b_v.to(b_k.dtype), b_h)
        slot = next_slot
    tl.store(h + ((first_chunk + last) * HV + i_h) * K * V + tile, b_h.to(h.dtype.element_ty), mask=m_kv)
    hand_over(b_h, slot, states + tile, flags, m_kv, HV * K * V, HV * NV, INTERPRETED)
    if SAVE:
        done = tl.cast(last, tl.int64) * BT
        m_t = o_t < rows - last * BT
        m_tv = m_t[:, None] & m_v[None, :]
        b_w = tl.load(w + done * (HV * K) + row_k, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_v = tl.load(u + done * (HV * V) + row_v, mask=m_tv, other=0.0) - tl.dot(b_w, b_h.to(b_w.dtype))
        tl.store(v_new + done * (HV * V) + row_v, b_v.to(v_new.dtype.element_ty), mask=m_tv)


@triton.jit
def _backward(
    q, k, w, g, gk, do, dv, dv2, dh, start_gradients, slot_of_chunk, queue, slot_offsets, slot_runs, counts, ticket,
    scale, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, USE_G: tl.constexpr, USE_GK: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    NV: tl.constexpr = (V + BV - 1) // BV
    run, i_h, i_v, begin, rows, first_chunk, start = take_work(ticket, queue, HV, NV, SPREAD)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    tile = o_k[:, None] * V + o_v[None, :]

    o_t = tl.arange(0, BT)
    row_v = o_t[:, None] * (HV * V) + o_v[None, :]
    column_q = o_k[:, None] + o_t[None, :] * (H * K)
    column_w = o_k[:, None] + o_t[None, :] * (HV * K)
    q += (begin * H + i_h // (HV // H)) * K
    k += (begin * H + i_h // (HV // H)) * K
    w += (begin * HV + i_h) * K
    do += (begin * HV + i_h) * V
    dv += (begin * HV + i_h) * V
    dv2 += (begin * HV + i_h) * V
    if USE_G:
        g += begin * HV + i_h
    if USE_GK:
        gk += (begin * HV + i_h) * K
    last = tl.cdiv(rows, BT) - 1
    # Of the last chunk, which alone may not be full: nothing comes from behind it.
    done = tl.cast(last, tl.int64) * BT
    m_t = o_t < rows - last * BT
    m_tv = m_t[:, None] & m_v[None, :]
    m_kt = m_k[:, None] & m_t[None, :]
    b_dh = tl.zeros([BK, BV], dtype=tl.float32)
    tl.store(dh + ((first_chunk + last) * HV + i_h) * K * V + tile, b_dh.to(dh.dtype.element_ty), mask=m_kv)
    e_dv = tl.load(dv + done * (HV * V) + row_v, mask=m_tv, other=0.0)
    tl.store(dv2 + done * (HV * V) + row_v, e_dv.to(dv2.dtype.element_ty), mask=m_tv)
    e_do = tl.load(do + done * (HV * V) + row_v, mask=m_tv, other=0.0)
    e_w = tl.load(w + done * (HV * K) + column_w, mask=m_kt, other=0.0)
    e_q = tl.load(q + done * (H * K) + column_q, mask=m_kt, other=0.0)
    if USE_G:
        e_q = (e_q * tl.exp2(tl.load(g + done * HV + o_t * HV, mask=m_t, other=0.0))[None, :]).to(e_q.dtype)
    b_dh = tl.dot(e_q, e_do.to(e_q.dtype)) * scale - tl.dot(e_w, e_dv.to(e_w.dtype))

    slot = tl.load(slot_of_chunk + first_chunk + last)
    g_last = tl.load(g + (done - 1) * HV, mask=last > 0, other=0.0) if USE_G else 0.0
    gk_last = tl.load(gk + (done - 1) * (HV * K) + o_k, mask=m_k & (last > 0), other=0.0) if USE_GK else 0.0
    for back in range(1, last + 1):
        i = last - back
        done = tl.cast(i, tl.int64) * BT
        if slot >= 0:
            count = counts + (tl.cast(slot, tl.int64) * HV + i_h) * NV + i_v
            p_d = start_gradients + i_h * K * V + tile
            b_dh = add_gradients(b_dh, p_d, m_kv, HV * K * V, slot, slot_offsets, slot_runs, count)
        # What is not a tile is not copied ahead with the tiles: it is read one chunk early here.
        slot = tl.load(slot_of_chunk + first_chunk + i)
        if USE_G:
            next_g_last = tl.load(g + (done - 1) * HV, mask=i > 0, other=0.0)
        if USE_GK:
            next_gk_last = tl.load(gk + (done - 1) * (HV * K) + o_k, mask=m_k & (i > 0), other=0.0)
        tl.store(dh + ((first_chunk + i) * HV + i_h) * K * V + tile, b_dh.to(dh.dtype.element_ty), mask=m_kv)

        b_do = tl.load(do + done * (HV * V) + row_v, mask=m_v[None, :], other=0.0)
        b_k = tl.load(k + done * (H * K) + o_t[:, None] * (H * K) + o_k[None, :], mask=m_k[None, :], other=0.0)
        b_dv = tl.dot(b_k, b_dh.to(b_k.dtype))
        if USE_G:
            b_g = tl.load(g + done * HV + o_t * HV)
            b_dv *= tl.exp2(g_last - b_g)[:, None]
        b_dv += tl.load(dv + done * (HV * V) + row_v, mask=m_v[None, :], other=0.0)
        tl.store(dv2 + done * (HV * V) + row_v, b_dv.to(dv2.dtype.element_ty), mask=m_v[None, :])

        b_w = tl.load(w + done * (HV * K) + column_w, mask=m_k[:, None], other=0.0)
        b_q = tl.load(q + done * (H * K) + column_q, mask=m_k[:, None], other=0.0)
        # Rounded to 16 bits like the other operand; fla multiplies here in tf32, at an eighth of the speed.
        if USE_G:
            b_dh *= tl.exp2(g_last)
            b_q = (b_q * tl.exp2(b_g)[None, :]).to(b_q.dtype)
            g_last = next_g_last
        if USE_GK:
            b_dh *= tl.exp2(gk_last)[:, None]
            gk_last = next_gk_last
        b_dh += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv.to(b_w.dtype))

    if start >= 0:
        p_d = start_gradients + (run * HV + i_h) * K * V + tile
        hand_back(b_dh, p_d, m_kv, counts + (start * HV + i_h) * NV + i_v)


LARGE_BLOCK_V = 64
FEW = 0.75
"""Tiles of that many values for each multiprocessor at a time, up to which runs count as few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchShapes:
    """By how much work there is at a time."""

    few: LaunchShape
    """Where runs are too few to fill the device: smaller tiles, so that more programs share a run's work."""
    many: LaunchShape
    """Where they are not: larger tiles, which read less."""


FORWARD = {
    128: LaunchShapes(
        few=LaunchShape(block_v=32, num_warps=4, num_stages=4),
        many=LaunchShape(block_v=32, num_warps=4, num_stages=2, spread=True),
    ),
    256: LaunchShapes(
        few=LaunchShape(block_v=32, num_warps=4, num_stages=2),
        many=LaunchShape(block_v=32, num_warps=4, num_stages=2),
    ),
}
BACKWARD = {
    128: LaunchShapes(
        few=LaunchShape(block_v=32, num_warps=4, num_stages=3, spread=True),
        many=LaunchShape(block_v=64, num_warps=8, num_stages=3),
    ),
    256: FORWARD[256],
}
"""By key width, up to and including; of `python -m benchmarks.layers linear --sweep` on an H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaRuleRows:
    """What both directions read of rows in run order. Shapes have fla's leading 1; HV is a multiple of H."""

    k: Tensor
    """[1, R, H, K] keys of the state update; decayed already where decays differ by key channel, H being HV then."""
    w: Tensor
    """[1, R, HV, K] keys of the WY form."""
    g: Tensor | None
    """[1, R, HV] float32. log2-decays, cumulative within chunks; None where they differ by key channel, or are zero."""
    gk: Tensor | None
    """[1, R, HV, K] float32. The same by key channel; None otherwise."""


def tree_states(rows: DeltaRuleRows, u: Tensor, *, launch: LaunchIndex, save_values: bool = True) -> tuple[Tensor, ...]:
    """The state before every chunk.

    Args:
        rows: R rows in run order.
        u: [1, R, HV, V] values of the WY form.
        launch: Of the R rows.
        save_values: Whether to return the values that chunks write.

    Returns:
        h [1, G, HV, K, V] in the dtype of the keys and, if they are saved, the written values [1, R, HV, V].
    """
    num_key_heads, key_width = rows.k.shape[2:]
    num_heads, value_width = u.shape[2:]
    shape = _shape(FORWARD, key_width, launch.mean_parallel_runs * num_heads * value_width / LARGE_BLOCK_V, u.device)
    h = rows.k.new_empty(1, launch.slot_G.numel(), num_heads, key_width, value_width)
    values = torch.empty_like(u) if save_values else None
    states = h.new_empty(launch.num_slots, num_heads, key_width, value_width, dtype=torch.float32)
    blocks = num_heads * triton.cdiv(value_width, shape.block_v)
    ticket, flags = ticket_and_flags(launch.num_slots * blocks, u.device)
    _forward[(launch.num_runs * blocks,)](
        rows.k, u, rows.w, values, rows.g, rows.gk, h, states, launch.slot_G, launch.forward_queue, flags, ticket,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, BK=padded(key_width),
        BV=shape.block_v, USE_G=rows.g is not None, USE_GK=rows.gk is not None, SAVE=save_values,
        SPREAD=spread(shape, u.device), INTERPRETED=triton.knobs.runtime.interpret, num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip
    return (h,) if values is None else (h, values)


def tree_state_gradients(
    rows: DeltaRuleRows, q: Tensor, do: Tensor, dv: Tensor, *, scale: float, launch: LaunchIndex
) -> tuple[Tensor, Tensor]:
    """The gradient of the state after every chunk.

    Args:
        rows: R rows in run order.
        q: [1, R, H, K] queries, decayed already where decays differ by key channel.
        do: [1, R, HV, V] gradients of the outputs.
        dv: [1, R, HV, V] gradients of the written values from inside their chunk.
        scale: Of the queries.
        launch: Of the R rows.

    Returns:
        dh [1, G, HV, K, V] in the dtype of the queries, and the whole gradients of the written values [1, R, HV, V].
    """
    num_key_heads, key_width = q.shape[2:]
    num_heads, value_width = do.shape[2:]
    shape = _shape(BACKWARD, key_width, launch.mean_parallel_runs * num_heads * value_width / LARGE_BLOCK_V, q.device)
    dh = q.new_empty(1, launch.slot_G.numel(), num_heads, key_width, value_width)
    total_dv = torch.empty_like(dv)
    start_gradients = dh.new_empty(launch.num_runs, num_heads, key_width, value_width, dtype=torch.float32)
    blocks = num_heads * triton.cdiv(value_width, shape.block_v)
    ticket, counts = ticket_and_flags(launch.num_slots * blocks, q.device)
    queue = backward_queue(launch, blocks, q.device)
    _backward[(launch.num_runs * blocks,)](
        q, rows.k, rows.w, rows.g, rows.gk, do, dv, total_dv, dh, start_gradients, launch.slot_G, queue,
        launch.slot_offsets, launch.slot_runs, counts, ticket, scale,
        H=num_key_heads, HV=num_heads, K=key_width, V=value_width, BT=launch.chunk_size, BK=padded(key_width),
        BV=shape.block_v, USE_G=rows.g is not None, USE_GK=rows.gk is not None, SPREAD=spread(shape, q.device),
        num_warps=shape.num_warps, num_stages=shape.num_stages,
    )  # fmt: skip
    return dh, total_dv


def _shape(shapes: Mapping[int, LaunchShapes], key_width: int, work: float, device: torch.device) -> LaunchShape:
    """The shape for keys of a width and for so many larger tiles of work at a time."""
    fitting = [shape for width, shape in shapes.items() if key_width <= width]
    if not fitting:
        raise ValueError(
            f"Heads have keys of {key_width} channels, expected at most {max(shapes)}. Run the layer through PyTorch."
        )
    return fitting[0].few if work <= FEW * multiprocessors(device) else fitting[0].many
