"""The selective scan of Mamba1 (arXiv 2312.00752, section 3) along a tree.

Its state decays by channel and state entry, so a chunk is no matrix product: inside chunks it is a loop over the C
positions, batched over all chunks of the tree, from a zero state; then states are handed from level to level, and
what each chunk started from is added with its decay since. A token recurrence may be cut anywhere, so the chunk size
is ours to choose.

Intermediate results are [G, C, D, K] for D channels. They are computed for some channels at a time and again in the
backward pass, so that about ten times `MAX_ELEMENTS` is the most that lives at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harts.layers.gather import gather_rows
from harts.layers.linear_attention.levels import states_along_levels
from harts.layout.chunk_index import ChunkIndex

CHUNK_SIZE = 64
"""C: few enough steps for the loop, few enough levels for the hand-over."""
MAX_ELEMENTS = 2**26
"""Of one [G, C, D, K] tensor; one channel is always taken."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SelectiveScanInputs:
    """One row a token; all of one dtype, float32 or float64."""

    value: Tensor
    """[rows, D]. What is written, one number a channel, before its step size."""
    step: Tensor
    """[rows, D]. Step size of every channel, > 0."""
    key: Tensor
    """[rows, K]. Writes to the state; all channels share it. Mamba's `B`."""
    query: Tensor
    """[rows, K]. Reads the state; all channels share it. Mamba's `C`."""
    rate: Tensor
    """[D, K], < 0. Log of the state's decay for a step of size 1; the same for all tokens. Mamba's `A`."""


def tree_selective_scan(inputs: SelectiveScanInputs, chunks: ChunkIndex) -> Tensor:
    """Run every path of a tree, each shared token's output computed once.

    Args:
        inputs: One row a packed token, T rows.
        chunks: Of the same tokens.

    Returns:
        [T, D], equal to `selective_scan_reference`; without the layer's skip term and gate.
    """
    channels = max(1, MAX_ELEMENTS // (chunks.token_GC.numel() * inputs.rate.shape[1]))
    streams = (inputs.value.split(channels, dim=-1), inputs.step.split(channels, dim=-1), inputs.rate.split(channels))
    outputs = [
        checkpoint(
            _scan_channels,
            SelectiveScanInputs(value=value, step=step, key=inputs.key, query=inputs.query, rate=rate),
            chunks,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for value, step, rate in zip(*streams, strict=True)
    ]
    return torch.cat(outputs, dim=-1)


def _scan_channels(inputs: SelectiveScanInputs, chunks: ChunkIndex) -> Tensor:
    # A zero row leaves the state as it is.
    value, step, key, query = (
        gather_rows(x, chunks.token_GC) for x in (inputs.value, inputs.step, inputs.key, inputs.query)
    )
    decay = (step.unsqueeze(-1) * inputs.rate).exp()
    since_start = (step.cumsum(1).unsqueeze(-1) * inputs.rate).exp()
    inside = _Recurrence.apply(decay, (value * step).unsqueeze(-1) * key.unsqueeze(2))

    def advance(level: slice, state: Tensor) -> Tensor:
        return since_start[level, -1] * state + inside[level, -1]

    zero = inside.new_zeros(chunks.num_roots, *inside.shape[2:])
    before, _ = states_along_levels(chunks, zero, advance)
    states = inside + since_start * before.unsqueeze(1)
    output = (states @ query.unsqueeze(-1)).squeeze(-1)
    return output.flatten(0, 1).index_select(0, chunks.slot_T)


class _Recurrence(torch.autograd.Function):
    """`S[:, i] = decay[:, i] * S[:, i - 1] + written[:, i]` from zero; [G, C, D, K] each.

    As one function, since autograd would keep three tensors a position where the states and decays are enough.
    """

    @staticmethod
    def forward(ctx: Any, decay: Tensor, written: Tensor) -> Tensor:
        states = written.clone()
        for i in range(1, states.shape[1]):
            states[:, i].addcmul_(decay[:, i], states[:, i - 1])
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        grad_written = grad_outputs[0].clone()
        for i in range(decay.shape[1] - 1, 0, -1):
            grad_written[:, i - 1].addcmul_(decay[:, i], grad_written[:, i])
        grad_decay = torch.zeros_like(decay)
        torch.mul(grad_written[:, 1:], states[:, :-1], out=grad_decay[:, 1:])
        return grad_decay, grad_written
