"""Tree step against flat step, on the same weights and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from harts.data import Trajectory
from harts.microbatches import Execution
from harts.models import TreeModel
from harts.objective.streams import Objective
from harts.step import StepResult, train_step

ROUNDING = 1e-6
"""Norm of a gradient that is nothing but float32 rounding: loss weights sum to 1, so a step that has something to
learn is orders above. Where all siblings earn the same, both gradients are below, and their difference says nothing."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Comparison:
    """Both steps and how far apart they are."""

    tree: StepResult
    """The tree step. Its gradients are left in `.grad`."""
    flat: StepResult
    """The flat step, whose gradients are kept nowhere."""
    max_logprob_diff: float
    """Largest absolute difference of a trained token's log-probability, nats."""
    max_grad_rel_diff: float | None
    """Largest over the parameters of ||g_tree - g_flat|| / ||g_flat|| (Euclidean norms of one parameter's gradient);
    where the flat gradient is 0, of ||g_tree||. None if the whole flat gradient is below `ROUNDING`."""


def compare_executions(
    prepared: TreeModel,
    trajectories: Sequence[Trajectory],
    objective: Objective,
    *,
    max_tokens_per_microbatch: int,
    first: Execution = "tree",
) -> Comparison:
    """Run the step both ways.

    Args:
        prepared: The model; its parameters must have no gradients.
        trajectories: Of one step.
        objective: The loss.
        max_tokens_per_microbatch: For both.
        first: Which runs first. Alternate it, so that neither gains from a warm cache.

    Returns:
        Both results and the differences.
    """
    gradients: dict[str, list[Tensor | None]] = {}
    results: dict[str, StepResult] = {}
    order: tuple[Literal["tree", "flat"], ...] = ("tree", "flat") if first == "tree" else ("flat", "tree")
    parameters = list(prepared.module.parameters())
    for execution in order:
        results[execution] = train_step(
            prepared,
            trajectories,
            objective,
            execution=execution,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        gradients[execution] = [parameter.grad for parameter in parameters]
        prepared.module.zero_grad(set_to_none=True)
    for parameter, gradient in zip(parameters, gradients["tree"], strict=True):
        parameter.grad = gradient
    difference_P = results["tree"].logprobs_P - results["flat"].logprobs_P
    relative = [_relative(tree, flat) for tree, flat in zip(gradients["tree"], gradients["flat"], strict=True)]
    whole = torch.stack([g.norm() for g in gradients["flat"] if g is not None]).norm().item()
    return Comparison(
        tree=results["tree"],
        flat=results["flat"],
        max_logprob_diff=float(np.abs(difference_P).max(initial=0.0)),
        max_grad_rel_diff=max(relative) if whole > ROUNDING else None,
    )


def _relative(tree: Tensor | None, flat: Tensor | None) -> float:
    if tree is None or flat is None:
        assert tree is flat, "one of the steps gave a parameter no gradient"
        return 0.0
    norm = float(torch.linalg.vector_norm(flat.double()))
    difference = float(torch.linalg.vector_norm(tree.double() - flat.double()))
    return difference / norm if norm > 0 else difference
