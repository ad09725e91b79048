"""The LM head on a GPU: library matrix products and one kernel a pass for all that is between them.

Forward, in chunks of edges: logits, then their statistics. Backward, in slices of the vocabulary, since the
statistics are known by then: logits again, their gradient in place, and the two products with it. So every slice of
the weight's gradient is one product over all edges, summed in float32 inside it and written once: no float32 copy of
the weight's size exists. Imports Triton: only what runs on a GPU imports this file.
"""

# Triton's kernels are launched by subscript; PyTorch's stubs lack `out_dtype`.
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from harts.logprobs.kernels import logits_gradient_kernel, softmax_statistics_kernel

LOGITS_AT_ONCE = 2**29
"""Elements; 1 GiB in bfloat16. Larger ones make the products over slices more efficient."""
ALIGNMENT = 64
"""Rows of logits are this many elements apart or a multiple of it, so that all loads are aligned."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FusedHead:
    """What the head needs besides hidden states and weights."""

    target_E: Tensor
    """[E] int64. Vocabulary ids."""
    scale_E: Tensor
    """[E] float32. What each edge's logits are multiplied by."""
    with_entropy: bool
    """Whether entropies are computed."""
    logits_dtype: torch.dtype | None = None
    """Of the logits between products and softmax; None for that of the hidden states, as transformers rounds them."""
    logits_at_once: int = LOGITS_AT_ONCE
    """Elements of the largest buffer."""


def fused_linear_logprobs(
    hidden_ED: Tensor, weight_WD: Tensor, bias_W: Tensor | None, head: FusedHead
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets and entropies under softmax(scale * (hidden @ weight.T + bias)).

    Args:
        hidden_ED: [E, D].
        weight_WD: [W, D] in the dtype of `hidden_ED`.
        bias_W: [W] or None.
        head: Of the E edges.

    Returns:
        logprob_E and entropy_E (nats; zeros unless asked for), float32.
    """
    return _FusedLogprobs.apply(hidden_ED, weight_WD, bias_W, head)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: FusedHead
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        edges, vocabulary = hidden.shape[0], weight.shape[0]
        logprob_E, normaliser_E = hidden.new_empty(2, edges, dtype=torch.float32).unbind()
        entropy_E = hidden.new_zeros(edges, dtype=torch.float32)
        chunk = min(edges, _multiple_below(head.logits_at_once // vocabulary, 128))
        buffer = _buffer(hidden, chunk, vocabulary, head.logits_dtype)
        for begin in range(0, edges, chunk):
            rows = slice(begin, min(begin + chunk, edges))
            logits = _logits(hidden[rows], weight, bias, out=buffer[: rows.stop - begin])
            softmax_statistics_kernel[(logits.shape[0],)](
                logits,
                head.target_E[rows],
                head.scale_E[rows],
                logprob_E[rows],
                entropy_E[rows],
                normaliser_E[rows],
                vocabulary,
                logits.stride(0),
                WITH_ENTROPY=head.with_entropy,
                LANES=512,
                WIDTH=16 // logits.element_size(),
                num_warps=8,
            )
        ctx.save_for_backward(hidden, weight, bias, normaliser_E, entropy_E)
        ctx.head = head
        return logprob_E, entropy_E

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normaliser_E, entropy_E = ctx.saved_tensors
        head: FusedHead = ctx.head
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        upstream = _upstream(*grad_outputs, entropy_E, head)
        edges, vocabulary = hidden.shape[0], weight.shape[0]
        at_most = _multiple_below(head.logits_at_once // edges, 256)
        # Slices of about one size, so that the last one is no small product.
        slices = -(-vocabulary // at_most)
        width = min(vocabulary, -(-vocabulary // (slices * 256)) * 256)
        buffer = _buffer(hidden, edges, width, head.logits_dtype)
        gradients = buffer if buffer.dtype == hidden.dtype else _buffer(hidden, edges, width, None)
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs_weight else None
        grad_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        for begin in range(0, vocabulary, width):
            words = slice(begin, min(begin + width, vocabulary))
            part = words.stop - begin
            logits = _logits(hidden, weight[words], None if bias is None else bias[words], out=buffer[:, :part])
            gradient = gradients[:, :part]
            _write_gradient(logits, gradient, upstream, normaliser_E, head, begin)
            if grad_hidden is not None:
                grad_hidden += _product_in_float32(gradient, weight[words])
            if grad_weight is not None:
                torch.mm(gradient.T, hidden, out=grad_weight[words])
            if grad_bias is not None:
                grad_bias[words] = gradient.sum(0, dtype=torch.float32).to(grad_bias.dtype)
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None


def _upstream(grad_logprob_E: Tensor, grad_entropy_E: Tensor, entropy_E: Tensor, head: FusedHead) -> Tensor:
    """[3, E] the coefficients of `logits_gradient_kernel`."""
    chosen, on_entropy = grad_logprob_E * head.scale_E, grad_entropy_E * head.scale_E
    if not head.with_entropy:
        return torch.stack([chosen, chosen, torch.zeros_like(chosen)])
    return torch.stack([chosen, chosen + on_entropy * entropy_E, on_entropy])


def _write_gradient(
    logits: Tensor, gradient: Tensor, upstream: Tensor, normaliser_E: Tensor, head: FusedHead, begin: int
) -> None:
    (edges, width), (rows, columns) = logits.shape, (4, 1024)
    column_blocks = triton.cdiv(width, columns)
    logits_gradient_kernel[(triton.cdiv(edges, rows) * column_blocks,)](
        logits,
        gradient,
        head.target_E,
        head.scale_E,
        normaliser_E,
        upstream,
        edges,
        column_blocks,
        begin,
        logits.stride(0),
        gradient.stride(0),
        WITH_ENTROPY=head.with_entropy,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )


def _buffer(like: Tensor, rows: int, columns: int, dtype: torch.dtype | None) -> Tensor:
    padded = -(-columns // ALIGNMENT) * ALIGNMENT
    return like.new_empty(rows, padded, dtype=dtype or like.dtype)[:, :columns]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    if out.dtype != hidden.dtype:
        torch.mm(hidden, weight.T, out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)
    return torch.mm(hidden, weight.T, out=out) if bias is None else torch.addmm(bias, hidden, weight.T, out=out)


def _product_in_float32(gradient: Tensor, weight: Tensor) -> Tensor:
    if gradient.dtype == torch.float32:
        return gradient @ weight
    return torch.mm(gradient, weight, out_dtype=torch.float32)


def _multiple_below(number: int, multiple: int) -> int:
    """The largest multiple that is no larger, but at least one multiple."""
    return max(number // multiple, 1) * multiple
