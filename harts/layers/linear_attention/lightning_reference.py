"""The definition: lightning attention, one token at a time, every token continuing its parent's state."""

from __future__ import annotations

import torch
from torch import Tensor


def lightning_attention_reference(
    query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, *, slope_H: Tensor, parent_T: Tensor
) -> Tensor:
    """`S = exp(-slope) S_parent + k v^T; out = S^T q`, with `S = 0` above a root (arXiv 2401.04658, section 3.1).

    Args:
        query_THK, key_THK: [T, H, K].
        value_THV: [T, H, V].
        slope_H: [H] >= 0.
        parent_T: [T] int64, -1 at a root; parents come before children.

    Returns:
        [T, H, V].
    """
    states, outputs = [], []
    decay = torch.exp(-slope_H)[:, None, None]
    for token, parent in enumerate(parent_T.tolist()):
        written = key_THK[token][:, :, None] * value_THV[token][:, None, :]
        state = decay * states[parent] + written if parent >= 0 else written
        states.append(state)
        outputs.append(torch.einsum("hkv,hk->hv", state, query_THK[token]))
    return torch.stack(outputs)
