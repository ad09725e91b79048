"""Float64 steps of trajectories that are each trained alone, run once for all tests that compare with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from harts.data import Trajectory
from harts.models.tiny import tiny_model
from harts.objective.streams import Objective
from harts.testing import float64_throughout, forward_one_trajectory_at_a_time, gradients
from tests.cases import Case, trajectories_of


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a step gives; shared, so not to be written to."""

    logprobs_P: Tensor
    loss: float
    gradients: dict[str, Tensor]


def step_of(model: PreTrainedModel, trajectories: Sequence[Trajectory], objective: Objective) -> Step:
    """The step of an unmodified model without activation checkpointing, whose gradients are empty before and after."""
    with float64_throughout():
        logprobs_P, loss = forward_one_trajectory_at_a_time(model, trajectories, objective)
    # What is float64 forward is so backward too, and there are more operators to look at.
    loss.backward()
    found = Step(logprobs_P=logprobs_P, loss=loss.item(), gradients=gradients(model))
    model.zero_grad()
    return found


@cache
def step_of_tiny(model_type: str, case: Case, objective: Objective) -> Step:
    """The step of a named tree on `tiny_model(model_type)` in float64."""
    return step_of(tiny_model(model_type, dtype=torch.float64), trajectories_of(case), objective)
