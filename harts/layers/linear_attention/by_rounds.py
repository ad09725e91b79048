"""Linear attention on a tree through calls of a kernel that only returns final states, one call a round.

The readable definition of rounds (model F), and the way to run kernels we know nothing else of.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from harts.layers.gather import gather_rows
from harts.layers.linear_attention.chunk_core import chunk_gated_delta_rule
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layout.rounds import RunPlan

Kernel = Callable[..., tuple[Tensor, Tensor]]


def gated_delta_rule_by_rounds(
    inputs: GatedDeltaInputs, runs: RunPlan, kernel: Kernel = chunk_gated_delta_rule
) -> Tensor:
    """Run the rounds of a plan one after the other; states are handed over with gradients.

    Args:
        inputs: One row a packed token, T rows.
        runs: Of the same tokens.
        kernel: `(inputs, cu_seqlens=, initial_state=, chunk_size=) -> (outputs, final states)`.

    Returns:
        [T, H, V], each token's output taken from the row that owns it.
    """
    token_R = torch.from_numpy(runs.token_R)
    rows = inputs.map(lambda x: gather_rows(x, token_R))
    offsets = torch.from_numpy(runs.run_offsets)
    state_shape = (*inputs.key.shape[1:], inputs.value.shape[-1])
    final_states = inputs.key.new_zeros(1, *state_shape)  # row 0 is the state above every root
    outputs = []
    for begin, end in _round_ranges(runs):
        # Round `n`: runs whose parents all ended in rounds before `n`.
        first_row, last_row = int(offsets[begin]), int(offsets[end])
        output, final_state = kernel(
            rows.map(lambda x, a=first_row, b=last_row: x[a:b]),
            cu_seqlens=offsets[begin : end + 1] - first_row,
            initial_state=final_states.index_select(0, torch.from_numpy(runs.run_parent[begin:end] + 1)),
            chunk_size=runs.chunk_size,
        )
        outputs.append(output)
        final_states = torch.cat([final_states, final_state])
    return torch.cat(outputs).index_select(0, torch.from_numpy(runs.owner_T))


def _round_ranges(runs: RunPlan) -> list[tuple[int, int]]:
    """First run and one past the last of every round."""
    offsets = np.searchsorted(runs.run_round, np.arange(runs.num_rounds + 1)).tolist()
    return list(pairwise(offsets))
