"""One training step: trajectories in, gradients out. Read this file first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory
from harts.objective.streams import Objective

Execution = Literal["tree", "flat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What a step computed. Gradients are in the parameters' `.grad`, added to what was there."""

    loss: float
    """The objective over the whole step."""
    metrics: dict[str, float]
    """The objective's metrics over the whole step."""
    logprobs_P: NDArray[np.float64]
    """[P] float64. Log-probabilities of the trained tokens, trajectory after trajectory, in the order given."""
    num_tokens_flat: int
    """F, the tokens of all trajectories."""
    num_tokens_distinct: int
    """Tokens computed: distinct ones within each microbatch (equals `num_tokens_flat` if flat)."""
    num_microbatches: int
    """Microbatches run."""
    num_rounds: int
    """Largest number of linear-attention rounds over the microbatches; 0 without linear attention or if flat."""
    num_replayed: int
    """Tokens whose linear-attention state update was repeated, over all microbatches; 0 if flat."""
    seconds: float
    """Wall time of the step, planning included."""


def train_step(
    model: object,
    trajectories: Sequence[Trajectory],
    objective: Objective,
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> StepResult:
    """Add the gradients of one step to the parameters of a prepared model."""
    raise NotImplementedError


def compute_logprobs(
    model: object,
    trajectories: Sequence[Trajectory],
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> NDArray[np.float64]:
    """[P] float64. Log-probabilities of the trained tokens without gradients (for sampling or reference streams)."""
    raise NotImplementedError
