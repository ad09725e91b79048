"""Per-token log-probs and entropies at the loss edges, chunk by chunk.

The logits of a chunk of edges are computed, reduced and dropped; the backward pass computes them again. So memory is
one chunk of logits, whatever the number of edges (the idea of Cut Cross-Entropy, arXiv 2411.09009, section 4).
This file is the definition; half-precision heads on a GPU with Triton take the kernels of `fused.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harts.layers.capability import takes_triton
from harts.layers.gather import gather_rows
from harts.layout.edges import LossEdges

LOGITS_PER_CHUNK = 2**25
"""Elements; 128 MiB in float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Head:
    target_E: Tensor
    temperature_E: Tensor
    with_entropy: bool
    chunk: int


def linear_logprobs(
    hidden_TD: Tensor, head: nn.Linear, edges: LossEdges, *, with_entropy: bool = False, logit_scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the edges' targets under softmax(logit_scale * head(hidden) / temperature).

    Args:
        hidden_TD: [rows, D]; only rows that predict a trained token go through the head.
        head: The LM head.
        edges: Of the same rows.
        with_entropy: Whether to return entropies too.
        logit_scale: What the model multiplies its logits by.

    Returns:
        logprob_E and entropy_E (nats, or None), float32 (float64 for float64 models).
    """
    hidden_ED = gather_rows(hidden_TD, edges.predictor_E)
    if _has_kernels(hidden_ED, head.weight):
        from harts.logprobs.fused import FusedHead, fused_linear_logprobs

        fused = FusedHead(
            target_E=edges.target_E,
            scale_E=(logit_scale / edges.temperature_E).float(),
            with_entropy=with_entropy,
        )
        logprob_E, entropy_E = fused_linear_logprobs(hidden_ED, head.weight, head.bias, fused)
        return logprob_E, entropy_E if with_entropy else None
    options = _Head(
        target_E=edges.target_E,
        temperature_E=edges.temperature_E / logit_scale,
        with_entropy=with_entropy,
        chunk=max(1, LOGITS_PER_CHUNK // head.out_features),
    )
    logprob_E, entropy_E = _LinearLogprobs.apply(hidden_ED, head.weight, head.bias, options)
    return logprob_E, entropy_E if with_entropy else None


def _has_kernels(hidden: Tensor, weight: Tensor) -> bool:
    return takes_triton(hidden) and hidden.dtype == weight.dtype and hidden.shape[0] > 0


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    logits = nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits / temperature.to(logits.dtype)[:, None]).log_softmax(-1)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Head) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.options = options
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprob_E, entropy_E = hidden.new_empty(2, hidden.shape[0], dtype=dtype).unbind()
        for begin in range(0, hidden.shape[0], options.chunk):
            rows = slice(begin, begin + options.chunk)
            log_p = _log_softmax(hidden[rows], weight, bias, options.temperature_E[rows])
            logprob_E[rows] = log_p.gather(1, options.target_E[rows, None])[:, 0]
            if options.with_entropy:
                entropy_E[rows] = -(log_p.exp() * log_p).sum(-1)
        return logprob_E, entropy_E

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob, grad_entropy = grad_outputs
        hidden, weight, bias = ctx.saved_tensors
        options = ctx.options
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad_logprob.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=grad_logprob.dtype) if bias is not None else None
        for begin in range(0, hidden.shape[0], options.chunk):
            rows = slice(begin, begin + options.chunk)
            log_p = _log_softmax(hidden[rows], weight, bias, options.temperature_E[rows])
            p = log_p.exp()
            grad_logits = -p * grad_logprob[rows, None]
            grad_logits.scatter_add_(1, options.target_E[rows, None], grad_logprob[rows, None])
            if options.with_entropy:
                entropy = -(p * log_p).sum(-1, keepdim=True)
                grad_logits -= grad_entropy[rows, None] * p * (log_p + entropy)
            grad_logits /= options.temperature_E[rows, None].to(grad_logits.dtype)
            grad_hidden[rows] = grad_logits.to(weight.dtype) @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.to(hidden.dtype).T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
        )
