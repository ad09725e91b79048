"""The gated delta rule in chunks, in plain PyTorch, on sequences or along a tree.

The decay is one number a head (Gated DeltaNet) or one a key channel (Kimi Delta Attention).

Work inside chunks is batched over all chunks of the tree at once. Only the state recurrence is sequential, and it
advances all paths together: chunk `n` of every path in one step, however many rounds a final-state kernel would need.

The chunk form is that of Gated DeltaNet (arXiv 2412.06464, section 3.3), in the order of operations of transformers'
`torch_chunk_gated_delta_rule`, so that each chunk does the arithmetic it does when its trajectory runs alone. That of
Kimi Delta Attention (arXiv 2510.26692, section 3) differs in the products of `channel_decay.py` alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.linear_attention.channel_decay import decayed_products
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.levels import (
    chunk_rows,
    final_states,
    owned_rows,
    sequence_chunks,
    states_along_levels,
)
from harts.layout.chunk_index import ChunkIndex


def tree_gated_delta_rule(inputs: GatedDeltaInputs, chunks: ChunkIndex) -> Tensor:
    """Run every path of a tree, each shared token's output computed once.

    Args:
        inputs: One row a packed token, T rows.
        chunks: Of the same tokens.

    Returns:
        [T, H, V], each path's outputs equal to `chunk_gated_delta_rule` on that path alone.
    """
    zero = inputs.key.new_zeros(chunks.num_roots, *inputs.key.shape[1:], inputs.value.shape[-1])
    output, _ = _run_chunks(inputs, chunks, zero)
    return output


def chunk_gated_delta_rule(
    inputs: GatedDeltaInputs, *, cu_seqlens: Tensor, initial_state: Tensor, chunk_size: int
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


def _run_chunks(inputs: GatedDeltaInputs, chunks: ChunkIndex, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [rows, H, V] and the state after each chunk [G, H, K, V]; `initial_state` is [chunks of level 0, ...]."""
    chunked = inputs.map(lambda x: chunk_rows(x, chunks))  # a zero row leaves the state as it is
    query, key = chunked.query, chunked.key
    key_beta, value_beta = (x * chunked.beta.unsqueeze(-1) for x in (key, chunked.value))
    decay = chunked.decay.cumsum(2)
    system, attention = _decayed_products(key_beta, query, key=key, decay=decay)
    if decay.dim() < key.dim():
        decay = decay.unsqueeze(-1)

    # Inside a chunk the delta rule is a unit lower triangular system: solved once for the values written and once
    # for what the state before the chunk already holds of them.
    written = torch.linalg.solve_triangular(system, value_beta, upper=False, unitriangular=True)
    known = torch.linalg.solve_triangular(system, key_beta * decay.exp(), upper=False, unitriangular=True)

    query = query * decay.exp()
    key = key * (decay[..., -1:, :] - decay).exp()
    chunk_decay = decay[..., -1, :].exp().unsqueeze(-1)
    updates = []

    def advance(level: slice, state: Tensor) -> Tensor:
        update = written[level] - known[level] @ state
        updates.append(update)
        return state * chunk_decay[level] + key[level].transpose(-1, -2) @ update

    before, after = states_along_levels(chunks, initial_state, advance)
    return owned_rows(query @ before + attention @ torch.cat(updates), chunks), after


def _decayed_products(*left: Tensor, key: Tensor, decay: Tensor) -> tuple[Tensor, ...]:
    """Each `left` times the keys under the decay between them, [G, H, C, C]; zero above the diagonal."""
    if decay.dim() == key.dim():
        return decayed_products(torch.stack(left, dim=2), key, decay).unbind(2)
    length = decay.shape[-1]
    above_diagonal = torch.ones(length, length, dtype=torch.bool, device=key.device).triu(1)
    pairwise = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(above_diagonal, float("-inf")).exp()
    return tuple((x @ key.transpose(-1, -2)) * pairwise for x in left)
