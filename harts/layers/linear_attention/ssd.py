"""State space duality (SSD), the recurrence of Mamba2, in chunks along a tree.

Work inside chunks is batched over all chunks of the tree at once; only states are handed from level to level. Heads
of a group share keys and queries, which are never repeated: a group's heads stand beside each other as columns of
one product. The chunk form is that of Mamba2 (arXiv 2405.21060, section 6); decays between two tokens are summed from
one to the other, not taken as a difference of two long sums, so that strong decays keep their precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.layers.linear_attention.levels import (
    chunk_rows,
    final_states,
    owned_rows,
    sequence_chunks,
    states_along_levels,
)
from harts.layout.chunk_index import ChunkIndex


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SSDInputs:
    """One row a token; all of one dtype, float32 or float64. Mamba's `C`, `B`, `x * dt` and `A * dt`.

    Head `h` uses the keys and queries of group `h // (heads / groups)`.
    """

    query: Tensor
    """[rows, groups, K]. Reads the state."""
    key: Tensor
    """[rows, groups, K]. Writes to the state."""
    value: Tensor
    """[rows, H, V]. What is written, step size included."""
    decay: Tensor
    """[rows, H]. Log of the state's decay at the token, <= 0."""

    def map(self, function: Callable[[Tensor], Tensor]) -> SSDInputs:
        """The same function applied to each stream."""
        return SSDInputs(
            query=function(self.query),
            key=function(self.key),
            value=function(self.value),
            decay=function(self.decay),
        )


def tree_ssd(inputs: SSDInputs, chunks: ChunkIndex) -> Tensor:
    """Run every path of a tree, each shared token's output computed once.

    Args:
        inputs: One row a packed token, T rows.
        chunks: Of the same tokens.

    Returns:
        [T, H, V], equal to `ssd_reference`; without the layer's skip term.
    """
    zero = inputs.key.new_zeros(chunks.num_roots, inputs.value.shape[1], inputs.key.shape[-1], inputs.value.shape[-1])
    output, _ = _run_chunks(inputs, chunks, zero)
    return output


def chunk_ssd(
    inputs: SSDInputs, *, cu_seqlens: Tensor, initial_state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Run independent sequences from given states: the public signature of a linear-attention kernel.

    Args:
        inputs: Rows of all sequences, one after the other.
        cu_seqlens: [sequences + 1] int64 on the CPU; sequence `i` is rows `cu_seqlens[i]:cu_seqlens[i + 1]`, at
            least one.
        initial_state: [sequences, H, K, V].
        chunk_size: C; chunks are counted from the start of each sequence.

    Returns:
        Outputs [rows, H, V] and final states [sequences, H, K, V].
    """
    chunks = sequence_chunks(cu_seqlens, chunk_size).to(inputs.key.device)
    output, states = _run_chunks(inputs, chunks, initial_state)
    return output, final_states(states, chunks, cu_seqlens)


def _run_chunks(inputs: SSDInputs, chunks: ChunkIndex, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [rows, H, V] and the state after each chunk [G, H, K, V]; `initial_state` is [chunks of level 0, ...]."""
    chunked = inputs.map(lambda x: chunk_rows(x, chunks))  # a zero row leaves the state as it is
    query, key = chunked.query, chunked.key  # [G, groups, C, K]
    groups = key.shape[1]
    value = chunked.value.unflatten(1, (groups, -1))  # [G, groups, heads of a group, C, V]
    decay = chunked.decay.unflatten(1, (groups, -1))
    from_start = decay.cumsum(-1)
    to_end = (from_start[..., -1:] - from_start).exp()

    scores = (query @ key.transpose(-1, -2)).unsqueeze(2) * _decay_between(decay)
    inside = scores @ value
    written = key.transpose(-1, -2) @ _as_columns(value * to_end.unsqueeze(-1))  # [G, groups, K, heads * V]
    written = written.unflatten(-1, (-1, value.shape[-1]))
    chunk_decay = from_start[..., -1].exp()[:, :, None, :, None]

    def advance(level: slice, state: Tensor) -> Tensor:
        return state * chunk_decay[level] + written[level]

    # [G, groups, K, heads of a group, V], so that a group's heads are columns of one product.
    grouped = initial_state.unflatten(1, (groups, -1)).transpose(2, 3)
    before, after = states_along_levels(chunks, grouped, advance)
    read = (query @ before.flatten(-2)).unflatten(-1, before.shape[-2:]).transpose(2, 3)
    output = inside + read * from_start.exp().unsqueeze(-1)
    return owned_rows(output.flatten(1, 2), chunks), after.transpose(2, 3).flatten(1, 2)


def _as_columns(x: Tensor) -> Tensor:
    """[G, groups, heads, C, V] to [G, groups, C, heads * V]."""
    return x.transpose(2, 3).flatten(-2)


def _decay_between(decay: Tensor) -> Tensor:
    """[..., C] to [..., C, C]: what is left at token `i` of what token `j <= i` wrote, zero for later `j`."""
    length = decay.shape[-1]
    on_or_above = torch.ones(length, length, dtype=torch.bool, device=decay.device).triu()
    steps = decay.unsqueeze(-1).expand(*decay.shape, length).masked_fill(on_or_above, 0.0)
    return steps.cumsum(-2).masked_fill(on_or_above.triu(1), float("-inf")).exp()
