"""The definition of the selective scan on a tree: one token at a time, every token continuing its parent's state."""

from __future__ import annotations

import torch
from torch import Tensor

from harts.layers.linear_attention.selective_scan import SelectiveScanInputs


def selective_scan_reference(inputs: SelectiveScanInputs, parent_T: Tensor) -> Tensor:
    """The recurrence of Mamba1 (arXiv 2312.00752, section 3.2).

    `S = exp(step rate) S_parent + (step value) key^T; out = S query`, with `S = 0` above a root.

    Args:
        inputs: As given to `tree_selective_scan`.
        parent_T: [T] int64, -1 at a root; parents come before children.

    Returns:
        [T, D].
    """
    states, outputs = [], []
    for token, parent in enumerate(parent_T.tolist()):
        step_D = inputs.step[token]
        state_DK = (step_D * inputs.value[token])[:, None] * inputs.key[token]
        if parent >= 0:
            state_DK = state_DK + (step_D[:, None] * inputs.rate).exp() * states[parent]
        states.append(state_DK)
        outputs.append(state_DK @ inputs.query[token])
    return torch.stack(outputs)
