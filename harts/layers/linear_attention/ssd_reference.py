"""The definition of SSD on a tree: one token at a time, every token continuing its parent's state."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.linear_attention.ssd import SSDInputs


def ssd_reference(inputs: SSDInputs, parent_T: Tensor) -> Tensor:
    """The recurrence of Mamba2 (arXiv 2405.21060, section 2).

    `S = exp(decay) S_parent + key value^T; out = S^T query`, with `S = 0` above a root.

    Args:
        inputs: As given to `tree_ssd`.
        parent_T: [T] int64, -1 at a root; parents come before children.

    Returns:
        [T, H, V].
    """
    copies = inputs.value.shape[1] // inputs.key.shape[1]
    states, outputs = [], []
    for token, parent in enumerate(parent_T.tolist()):
        query_HK, key_HK = (x[token].repeat_interleave(copies, dim=0) for x in (inputs.query, inputs.key))
        state_HKV = key_HK[:, :, None] * inputs.value[token][:, None, :]
        if parent >= 0:
            state_HKV = state_HKV + states[parent] * inputs.decay[token].exp()[:, None, None]
        states.append(state_HKV)
        outputs.append(torch.einsum("hkv,hk->hv", state_HKV, query_HK))
    return torch.stack(outputs)
