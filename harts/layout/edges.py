"""Loss edges: which hidden row predicts which token, and which edge every trained token reads."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossEdges:
    """The distinct log-probabilities of a microbatch.

    An edge is a predicted token under a temperature: trajectories that share a token share its edge, unless they were
    sampled at different temperatures.
    """

    predictor_E: Tensor
    """[E] int64. Row of the hidden states that predicts the edge's token."""
    target_E: Tensor
    """[E] int64. Vocabulary id of the predicted token."""
    temperature_E: Tensor
    """[E] float64, > 0."""
    edge_P: Tensor
    """[P] int64. Edge of every trained token of the microbatch, trajectory after trajectory."""

    def to(self, device: torch.device) -> LossEdges:
        """The same edges on another device."""
        return LossEdges(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def loss_edges(
    token_P: NDArray[np.int64],
    temperature_P: NDArray[np.float64],
    predictor_T: NDArray[np.int64],
    token_ids_T: NDArray[np.int64],
) -> LossEdges:
    """Merge equal (token, temperature) pairs.

    Args:
        token_P: [P] int64. Row of each trained token.
        temperature_P: [P] float64.
        predictor_T: [T] int64. Row that predicts each row's token.
        token_ids_T: [T] int64. Vocabulary ids.
    """
    _, temperature_class_P = np.unique(temperature_P, return_inverse=True)
    classes = int(temperature_class_P.max(initial=0)) + 1
    _, first_E, edge_P = np.unique(token_P * classes + temperature_class_P, return_index=True, return_inverse=True)
    token_E = token_P[first_E]
    return LossEdges(
        predictor_E=torch.from_numpy(predictor_T[token_E]),
        target_E=torch.from_numpy(token_ids_T[token_E]),
        temperature_E=torch.from_numpy(temperature_P[first_E]),
        edge_P=torch.from_numpy(edge_P),
    )
