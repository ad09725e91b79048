"""Lightning attention: linear attention with one constant decay a head, in chunks, on sequences or along a tree.

No delta rule and no gate of the data, so a chunk adds its keys times values to the state and nothing has to be solved
(Lightning Attention-2, arXiv 2401.04658, section 3.2). The order of operations is that of transformers' MiniMax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from harts.layers.activation import Activation
from harts.layers.linear_attention.levels import chunk_rows, owned_rows, states_along_levels
from harts.layout.chunk_index import ChunkIndex
from harts.layout.packed import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LightningDecays:
    """Decays over `n` rows, `exp(-slope n)`, as a model keeps them.

    They are read instead of computed again: a model in bfloat16 multiplies by rounded ones, and so must a tree.
    """

    slope_H: Tensor
    """[H] >= 0."""
    query_HC: Tensor
    """[H, C]. From before a chunk to each of its rows."""
    key_HC: Tensor
    """[H, C]. From each row of a full chunk to its end."""
    within_HCC: Tensor
    """[H, C, C]. From a row (last axis) to a later or the same one; zero for an earlier one."""

    @classmethod
    def of(cls, slope_H: Tensor, chunk_size: int) -> LightningDecays:
        """Exact to the dtype of the slopes."""
        row = torch.arange(chunk_size, device=slope_H.device)
        distance = row[:, None] - row
        within_HCC = torch.exp(-slope_H[:, None, None] * distance.clamp(min=0))
        return cls(
            slope_H=slope_H,
            query_HC=torch.exp(-slope_H[:, None] * (row + 1)),
            key_HC=torch.exp(-slope_H[:, None] * (chunk_size - 1 - row)),
            within_HCC=within_HCC.masked_fill(distance < 0, 0.0),
        )


def tree_lightning_attention(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, *, decays: LightningDecays, chunks: ChunkIndex
) -> Tensor:
    """Run every path of a tree, each shared token's output computed once.

    Args:
        query_THK, key_THK: [T, H, K], float32 or float64.
        value_THV: [T, H, V].
        decays: In the same dtype.
        chunks: Of the same tokens; its chunk size is that of the decays.

    Returns:
        [T, H, V], equal to `out = S^T q` with `S = exp(-slope) S_parent + k v^T` on each path alone.
    """
    query, key, value = (chunk_rows(x, chunks) for x in (query_THK, key_THK, value_THV))
    chunk_size, num_tokens = chunks.token_GC.shape[1], query_THK.shape[0]
    length_G = (chunks.token_GC < num_tokens).sum(1)
    # A chunk that is cut short ends at its last row: its keys decay as the last rows of a full one.
    row_GC = torch.arange(chunk_size, device=length_G.device) + (chunk_size - length_G)[:, None]
    key_decay_HGC = decays.key_HC[:, row_GC.clamp(max=chunk_size - 1)]
    updates = (key * key_decay_HGC.transpose(0, 1).unsqueeze(-1)).transpose(-1, -2) @ value
    chunk_decay = torch.exp(-decays.slope_H * length_G[:, None])[..., None, None]

    zero = query.new_zeros(chunks.num_roots, *updates.shape[1:])
    before, _ = states_along_levels(chunks, zero, lambda level, state: state * chunk_decay[level] + updates[level])
    within = (query @ key.transpose(-1, -2) * decays.within_HCC) @ value
    return owned_rows((query * decays.query_HC.unsqueeze(-1)) @ before + within, chunks)


def lightning_by_fla(mixed_THM: Tensor, slope_H: Tensor, layout: PackedLayout, *, activation: Activation) -> Tensor:
    """Lightning attention of packed tokens through fla, in its chunks.

    Args:
        mixed_THM: [T, H, K + K + V] with K = V: queries, keys and values side by side, in 16 bits on a GPU.
        slope_H: [H] float32, >= 0. Decays are taken exactly from it, not rounded as a model in 16 bits keeps them.
        layout: Of the T tokens.
        activation: Of queries, keys and values.

    Returns:
        [T, H, V] in the dtype of `mixed_THM`.
    """
    from harts.layers.linear_attention.fla_simple_gla import CHUNK_SIZE, tree_lightning_rows
    from harts.layers.linear_attention.kernels.activated_rows import activated_rows
    from harts.layers.rows import owned_rows

    index = layout.indices.launch_conv(CHUNK_SIZE).rows
    query_RHK, key_RHK, value_RHV = activated_rows(mixed_THM, index, activation)
    output_RHV = tree_lightning_rows(
        query_RHK, key_RHK, value_RHV, slope_H=slope_H, launch=layout.indices.launch(CHUNK_SIZE)
    )
    return owned_rows(output_RHV, index)
