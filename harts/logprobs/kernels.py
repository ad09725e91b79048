"""Triton kernels of the LM head: what a softmax over the vocabulary needs of the logits, in one pass each way."""

# Triton's kernels: names of compile-time arguments.
# ruff: noqa: N803, PLR0913, PLR0917
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Finite, so that lanes without logits never subtract infinities.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def softmax_statistics_kernel(
    logits_ptr,
    target_ptr,
    scale_ptr,
    logprob_ptr,
    entropy_ptr,
    normaliser_ptr,
    vocabulary,
    stride_logits,
    WITH_ENTROPY: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Log-prob of the target, entropy and log-sum-exp of one row of `logits * scale`.

    Each lane keeps a running maximum of its own (base 2), so nothing is reduced across lanes before the end and one
    exponential a logit is enough.
    """
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride_logits
    scale = tl.load(scale_ptr + row)
    place = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    highest = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    # Sum of (z - highest) * 2^(z - highest).
    weighted, weighted_sum = tl.zeros([LANES], tl.float32), 0.0
    for begin in range(0, vocabulary, LANES * WIDTH):
        # Aligned, whatever the vocabulary: rows are padded.
        logits = tl.load(logits_ptr + begin + place, mask=begin + place < stride_logits, other=0.0).to(tl.float32)
        z = tl.where(begin + place < vocabulary, logits * (scale * LOG2_E), LOWEST)
        higher = tl.maximum(highest, tl.max(z, axis=1))
        shrink = tl.exp2(highest - higher)
        distance = z - higher[:, None]
        power = tl.exp2(distance)
        if WITH_ENTROPY:
            weighted = (weighted + (highest - higher) * total) * shrink + tl.sum(distance * power, axis=1)
        total = total * shrink + tl.sum(power, axis=1)
        highest = higher
    peak = tl.max(highest, axis=0)
    shrink = tl.exp2(highest - peak)
    if WITH_ENTROPY:
        weighted_sum = tl.sum((weighted + (highest - peak) * total) * shrink, axis=0)
    total_sum = tl.sum(total * shrink, axis=0)
    log_total = tl.log2(total_sum)
    normaliser = (peak + log_total) * LN_2
    chosen = tl.load(logits_ptr + tl.load(target_ptr + row)).to(tl.float32) * scale
    tl.store(normaliser_ptr + row, normaliser)
    tl.store(logprob_ptr + row, chosen - normaliser)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, (log_total - weighted_sum / total_sum) * LN_2)


@triton.jit
def logits_gradient_kernel(
    logits_ptr,
    gradient_ptr,
    target_ptr,
    scale_ptr,
    normaliser_ptr,
    upstream_ptr,
    num_rows,
    column_blocks,
    begin,
    stride_logits,
    stride_gradient,
    WITH_ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of a slice of logits, which may take their place: onehot * a - p * (b + c * log p).

    `upstream_ptr` holds a, b and c of every row, one after the other.
    """
    row = tl.program_id(0) // column_blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < num_rows
    # Up to the end of padded rows, so that all accesses are aligned.
    inside = in_rows[:, None] & (column < tl.minimum(stride_logits, stride_gradient))[None, :]
    place = row.to(tl.int64)[:, None]
    logits = tl.load(logits_ptr + place * stride_logits + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=in_rows, other=0.0)
    log_p = logits * scale[:, None] - tl.load(normaliser_ptr + row, mask=in_rows, other=0.0)[:, None]
    factor = tl.load(upstream_ptr + num_rows + row, mask=in_rows, other=0.0)[:, None]
    if WITH_ENTROPY:
        factor += tl.load(upstream_ptr + 2 * num_rows + row, mask=in_rows, other=0.0)[:, None] * log_p
    target = tl.load(target_ptr + row, mask=in_rows, other=-1)
    chosen = tl.load(upstream_ptr + row, mask=in_rows, other=0.0)
    is_target = (begin + column)[None, :] == target[:, None]
    gradient = tl.where(is_target, chosen[:, None], 0.0) - tl.exp2(log_p * LOG2_E) * factor
    gradient_ptr += place * stride_gradient + column[None, :]
    tl.store(gradient_ptr, gradient.to(gradient_ptr.dtype.element_ty), mask=inside)
