"""The definition: the gated delta rule, one token at a time, every token continuing its parent's state."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.linear_attention.inputs import GatedDeltaInputs


def gated_delta_rule_reference(inputs: GatedDeltaInputs, parent_T: Tensor) -> Tensor:
    """Gated DeltaNet (arXiv 2412.06464, section 3.1) or Kimi Delta Attention (arXiv 2510.26692) on a tree.

    `S = exp(g) S_parent; S += beta k (v - S^T k)^T; out = S^T q`, with `S = 0` above a root; `exp(g)` is a number a
    head, or the diagonal of a K x K matrix.

    Args:
        inputs: As given to `chunk_gated_delta_rule`.
        parent_T: [T] int64, -1 at a root; parents come before children.

    Returns:
        [T, H, V].
    """
    states, outputs = [], []
    for token, parent in enumerate(parent_T.tolist()):
        query_HK, key_HK, value_HV = inputs.query[token], inputs.key[token], inputs.value[token]
        state_HKV = states[parent] if parent >= 0 else key_HK.new_zeros(*key_HK.shape, value_HV.shape[-1])
        decay_HK = inputs.decay[token].exp().reshape(key_HK.shape[0], -1)  # [H, 1] if a head's channels share it
        state_HKV = state_HKV * decay_HK[:, :, None]
        error_HV = (value_HV - torch.einsum("hkv,hk->hv", state_HKV, key_HK)) * inputs.beta[token][:, None]
        state_HKV = state_HKV + key_HK[:, :, None] * error_HV[:, None, :]
        states.append(state_HKV)
        outputs.append(torch.einsum("hkv,hk->hv", state_HKV, query_HK))
    return torch.stack(outputs)
