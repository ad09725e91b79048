"""Triton kernels of the short convolution; `kernel.py` launches them.

The forward pass gathers ancestors and writes rows of the run order. The backward pass walks tiles of packed tokens
from the last to the first with what it still needs of the tokens below in registers, so each of `x`, `dy` and `dx`
moves about once. It treats the tree as chains; the few tokens with several descendants at one distance are written
again by `branching_gradient_kernel`, from the float32 gradients that the walk leaves for it.

Up to four outputs ("pieces") share a launch. A block of channels belongs to one piece.
"""

# What Triton compiles is not quite Python: names of compile-time arguments, tuples that grow, indices of scalars.
# ruff: noqa: N803, N806, PLR0913, PLR0917, RUF005, SIM108
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from harts.layout.conv_index import TokenFlag

LOG2_E = tl.constexpr(1.4426950408889634)
BREAK = tl.constexpr(int(TokenFlag.BREAK))
SHARED = tl.constexpr(int(TokenFlag.SHARED))
NEEDED = tl.constexpr(int(TokenFlag.NEEDED))


@triton.jit
def _piece_of(block, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, W3: tl.constexpr, BLOCK_D: tl.constexpr):
    """Piece of a block of channels, the piece's first channel and width, and the block's channels within it."""
    end_0: tl.constexpr = (W0 + BLOCK_D - 1) // BLOCK_D
    end_1: tl.constexpr = end_0 + (W1 + BLOCK_D - 1) // BLOCK_D
    end_2: tl.constexpr = end_1 + (W2 + BLOCK_D - 1) // BLOCK_D
    piece = (block >= end_0).to(tl.int32) + (block >= end_1).to(tl.int32) + (block >= end_2).to(tl.int32)
    first_block = tl.where(piece == 0, 0, tl.where(piece == 1, end_0, tl.where(piece == 2, end_1, end_2)))
    start = tl.where(piece == 0, 0, tl.where(piece == 1, W0, tl.where(piece == 2, W0 + W1, W0 + W1 + W2)))
    width = tl.where(piece == 0, W0, tl.where(piece == 1, W1, tl.where(piece == 2, W2, W3)))
    local = (block - first_block) * BLOCK_D + tl.arange(0, BLOCK_D)
    return piece, start, width, local


@triton.jit
def _pointer_of(piece, p0, p1, p2, p3):
    return tl.where(piece == 0, p0, tl.where(piece == 1, p1, tl.where(piece == 2, p2, p3)))


@triton.jit
def sigmoid(x, APPROXIMATE: tl.constexpr):
    """Of float32; approximate where compiled for a GPU."""
    if APPROXIMATE:
        # Within 2 ulp; without the handling of denormals, which costs more than the two instructions.
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_weights(weight_ptr, bias_ptr, channel, inside, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The weights from the token's own to its farthest ancestor's, and the bias."""
    weights = ()
    for j in tl.static_range(TAPS):
        weight = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - j), mask=inside, other=0.0)
        weights = weights + (weight.to(tl.float32),)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros_like(weights[0])
    return weights, bias


@triton.jit
def conv_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ancestor_ptr,
    y0_ptr,
    y1_ptr,
    y2_ptr,
    y3_ptr,
    num_rows,
    stride_x,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    TAPS: tl.constexpr,
    TABLE: tl.constexpr,
    SILU: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS_D: tl.constexpr,
):
    """y[row] = act(bias + sum_j weight[J - 1 - j] * x[ancestor_j(row)]), farthest ancestor first.

    ROUNDED: Sums are rounded to the dtype of the weights before the activation, as PyTorch's convolution returns them.
    """
    program = tl.program_id(0)
    piece, start, width, local = _piece_of(program % BLOCKS_D, W0, W1, W2, W3, BLOCK_D)
    inside = local < width
    weights, bias = _load_weights(weight_ptr, bias_ptr, start + local, inside, TAPS, HAS_BIAS)
    row = (program // BLOCKS_D) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < num_rows
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32) + bias[None, :]
    for j in tl.static_range(TAPS - 1, -1, -1):
        token = tl.load(ancestor_ptr + row.to(tl.int64) * TABLE + j, mask=in_rows, other=-1)
        place = token.to(tl.int64)[:, None] * stride_x + (start + local)[None, :]
        x = tl.load(x_ptr + place, mask=(token >= 0)[:, None] & inside[None, :], other=0.0)
        total = tl.fma(x.to(tl.float32), tl.broadcast_to(weights[j][None, :], [BLOCK_R, BLOCK_D]), total)
    if SILU:
        if ROUNDED:
            total = total.to(weight_ptr.dtype.element_ty).to(tl.float32)
        total *= sigmoid(total, APPROXIMATE)
    y_ptr = _pointer_of(piece, y0_ptr, y1_ptr, y2_ptr, y3_ptr)
    place = row.to(tl.int64)[:, None] * width + local[None, :]
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & inside[None, :])


@triton.jit
def _load_rows(sources, sizes, token, inside, COUNT: tl.constexpr, TAPS: tl.constexpr, TABLE: tl.constexpr):
    """What all tokens need, for some from `token` up: farthest ancestor's `x`, gradient in the first row, flags."""
    x_ptr, dy_ptr, ancestor_ptr, row_ptr, flag_ptr = sources
    num_tokens, stride_x, width = sizes
    loaded = ()
    for u in tl.static_range(COUNT):
        exists = (token - u < num_tokens) & (token - u >= 0)
        place = (token - u).to(tl.int64)
        above = tl.load(ancestor_ptr + place * TABLE + TAPS - 1, mask=exists, other=-1)
        row = tl.load(row_ptr + place, mask=exists, other=0)
        flags = tl.load(flag_ptr + place, mask=exists, other=BREAK)
        far = tl.load(x_ptr + above.to(tl.int64) * stride_x, mask=inside & (above >= 0), other=0.0)
        dy = tl.load(dy_ptr + row.to(tl.int64) * width, mask=inside & exists, other=0.0)
        loaded = loaded + ((far, dy, flags),)
    return loaded


@triton.jit
def _through_activation(
    taps, dy, weights, bias, TAPS: tl.constexpr, SILU: tl.constexpr, SUM: tl.constexpr, APPROXIMATE: tl.constexpr
):
    """Gradient of the sum before the activation, which is computed again and rounded to SUM."""
    gradient = dy
    if SILU:
        before = bias
        for j in tl.static_range(TAPS - 1, -1, -1):
            before = tl.fma(taps[j], weights[j], before)
        before = before.to(SUM).to(tl.float32)
        gate = sigmoid(before, APPROXIMATE)
        gradient = dy * gate * (1.0 + before * (1.0 - gate))
    return gradient


@triton.jit
def _summed_over_rows(dy, flags, shared, token, inside, CHANNELS: tl.constexpr):
    """A token's gradient, from the sums if it has several rows."""
    sum_ptr, slot_ptr = shared
    gradient = dy.to(tl.float32)
    if (flags & SHARED) != 0:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        gradient = tl.load(sum_ptr + slot * CHANNELS, mask=inside, other=0.0)
    return gradient


@triton.jit
def _step_up(gradient, taps, below, TAPS: tl.constexpr):
    """What the token before sees if it is the parent: gradients below it, and what its convolution reads but one."""
    moved, near = (gradient,), (taps[1],)
    for j in tl.static_range(TAPS - 2):
        moved, near = moved + (below[j],), near + (taps[j + 2],)
    return moved, near


@triton.jit
def _add_products(dweights, gradient, taps, TAPS: tl.constexpr):
    added = ()
    for j in tl.static_range(TAPS):
        added = added + (tl.fma(gradient, taps[j], dweights[j]),)
    return added


@triton.jit
def _zeros(like, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros_like(like),)
    return zeros


@triton.jit
def _reload(sources, sizes, token, inside, TAPS: tl.constexpr, TABLE: tl.constexpr):
    """What the convolution of a token reads but the farthest; zeros for a token that does not exist."""
    x_ptr, _, ancestor_ptr, _, _ = sources
    num_tokens, stride_x, _ = sizes
    token = tl.where(token < num_tokens, token, -1).to(tl.int64)
    near = ()
    for j in tl.static_range(TAPS - 1):
        above = tl.load(ancestor_ptr + token * TABLE + j, mask=token >= 0, other=-1)
        x = tl.load(x_ptr + above.to(tl.int64) * stride_x, mask=inside & (above >= 0), other=0.0)
        near = near + (x.to(tl.float32),)
    return near


@triton.jit
def _walk_to_tile(
    sources,
    sizes,
    shared,
    weights,
    bias,
    end,
    inside,
    TAPS: tl.constexpr,
    TABLE: tl.constexpr,
    SILU: tl.constexpr,
    SUM: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Through the J - 1 tokens packed after a tile, which only pass their gradients up.

    Returns the gradients of the tokens one to J - 1 places below the tile's last token, zero once the path to them is
    broken, and what that token's convolution reads but the farthest.
    """
    below = _zeros(bias, TAPS - 1)
    token = end + TAPS - 2
    rows = _load_rows(sources, sizes, token, inside, TAPS - 1, TAPS, TABLE)
    near = _reload(sources, sizes, token, inside, TAPS, TABLE)
    for u in tl.static_range(TAPS - 1):
        far, dy, flags = rows[u]
        taps = near + (far.to(tl.float32),)
        gradient = _summed_over_rows(dy, flags, shared, token - u, inside, CHANNELS)
        gradient = _through_activation(taps, gradient, weights, bias, TAPS, SILU, SUM, APPROXIMATE)
        below, near = _step_up(gradient, taps, below, TAPS)
        if (flags & BREAK) != 0:
            below = _zeros(bias, TAPS - 1)
            near = _reload(sources, sizes, token - u - 1, inside, TAPS, TABLE)
    return below, near


@triton.jit
def conv_backward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    ancestor_ptr,
    row_ptr,
    flag_ptr,
    shared_slot_ptr,
    branch_slot_ptr,
    dy0_ptr,
    dy1_ptr,
    dy2_ptr,
    dy3_ptr,
    shared_sum_ptr,
    dx_ptr,
    needed_ptr,
    partial_ptr,
    num_tokens,
    stride_x,
    W0: tl.constexpr,
    W1: tl.constexpr,
    W2: tl.constexpr,
    W3: tl.constexpr,
    TAPS: tl.constexpr,
    TABLE: tl.constexpr,
    SILU: tl.constexpr,
    ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    APPROXIMATE: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """dx of a tile of tokens as on a chain, and the tile's part of dweight and dbias."""
    CHANNELS: tl.constexpr = W0 + W1 + W2 + W3
    SUM: tl.constexpr = weight_ptr.dtype.element_ty if ROUNDED else tl.float32
    tile = tl.program_id(0) // BLOCKS_D
    piece, start, width, local = _piece_of(tl.program_id(0) % BLOCKS_D, W0, W1, W2, W3, BLOCK_D)
    inside, channel = local < width, start + local
    weights, bias = _load_weights(weight_ptr, bias_ptr, channel, inside, TAPS, HAS_BIAS)
    dy_ptr = _pointer_of(piece, dy0_ptr, dy1_ptr, dy2_ptr, dy3_ptr) + local
    sources = (x_ptr + channel, dy_ptr, ancestor_ptr, row_ptr, flag_ptr)
    sizes, shared = (num_tokens, stride_x, width), (shared_sum_ptr + channel, shared_slot_ptr)
    dweights, dbias = _zeros(bias, TAPS), tl.zeros_like(bias)
    end = tile * BLOCK_T + BLOCK_T
    below, near = _walk_to_tile(
        sources, sizes, shared, weights, bias, end, inside, TAPS, TABLE, SILU, SUM, APPROXIMATE, CHANNELS
    )
    rows = _load_rows(sources, sizes, end - 1, inside, UNROLL, TAPS, TABLE)
    for group in range(BLOCK_T // UNROLL):
        token = end - 1 - group * UNROLL
        # One group ahead, and before the stores, which no load may pass.
        ahead = _load_rows(sources, sizes, token - UNROLL, inside, UNROLL, TAPS, TABLE)
        for u in tl.static_range(UNROLL):
            far, dy, flags = rows[u]
            taps = near + (far.to(tl.float32),)
            gradient = _summed_over_rows(dy, flags, shared, token - u, inside, CHANNELS)
            gradient = _through_activation(taps, gradient, weights, bias, TAPS, SILU, SUM, APPROXIMATE)
            dx = gradient * weights[0]
            for j in tl.static_range(1, TAPS):
                dx = tl.fma(below[j - 1], weights[j], dx)
            place = (token - u).to(tl.int64) * CHANNELS + channel
            tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside & (token - u < num_tokens))
            if WEIGHT_GRADIENT:
                dweights = _add_products(dweights, gradient, taps, TAPS)
                dbias += gradient
            below, near = _step_up(gradient, taps, below, TAPS)
            if (flags & NEEDED) != 0:
                slot = tl.load(branch_slot_ptr + token - u).to(tl.int64)
                tl.store(needed_ptr + slot * CHANNELS + channel, gradient, mask=inside)
            if (flags & BREAK) != 0:
                below = _zeros(bias, TAPS - 1)
                near = _reload(sources, sizes, token - u - 1, inside, TAPS, TABLE)
        rows = ahead
    if WEIGHT_GRADIENT:
        partial_ptr += tile.to(tl.int64) * (TAPS + 1) * CHANNELS + channel
        for j in tl.static_range(TAPS):
            tl.store(partial_ptr + (TAPS - 1 - j) * CHANNELS, dweights[j], mask=inside)
        tl.store(partial_ptr + TAPS * CHANNELS, dbias, mask=inside)


@triton.jit
def branching_gradient_kernel(
    needed_ptr,
    weight_ptr,
    dx_ptr,
    token_ptr,
    offset_ptr,
    slot_ptr,
    distance_ptr,
    channels,
    TAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dx of one branching token: over all of its descendants, the nearest first."""
    branch = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = channel < channels
    total = tl.zeros([BLOCK_D], tl.float32)
    for entry in tl.range(tl.load(offset_ptr + branch), tl.load(offset_ptr + branch + 1), loop_unroll_factor=4):
        distance, slot = tl.load(distance_ptr + entry), tl.load(slot_ptr + entry)
        # The index may be of a wider convolution.
        reached = inside & (distance < TAPS)
        weight = tl.load(weight_ptr + channel * TAPS + TAPS - 1 - distance, mask=reached, other=0.0)
        gradient = tl.load(needed_ptr + slot.to(tl.int64) * channels + channel, mask=reached, other=0.0)
        total = tl.fma(gradient, weight.to(tl.float32), total)
    token = tl.load(token_ptr + branch)
    tl.store(dx_ptr + token.to(tl.int64) * channels + channel, total.to(dx_ptr.dtype.element_ty), mask=inside)
