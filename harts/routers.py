"""What routers do in a step, without gradients: loads that a loss needs first, routes to be replayed later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from harts.data import Trajectory
from harts.data.ragged import ranges
from harts.layers.moe.losses import RouterLosses
from harts.layers.moe.statistics import RouterStatistics
from harts.microbatches import Execution, StepMicrobatches
from harts.models import TreeModel
from harts.plan.plan import Plan


@torch.no_grad()
def count_load(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
    plan: Plan | None = None,
    dp_rank: int = 0,
) -> RouterStatistics:
    """What the routers do with some trajectories, without gradients.

    Args:
        model: From `harts.prepare` with `router`.
        trajectories: As for `train_step`; their training streams are not read.
        execution: As for `train_step`.
        max_tokens_per_microbatch: As for `train_step`.
        plan: As for `train_step`.
        dp_rank: Rank of the plan whose microbatches are counted; the ranks' statistics add up.

    Returns:
        Loads, without losses. Their sum over the ranks is what `RouterLosses.load` takes.

    Raises:
        ValueError: If the model was prepared without `router`, or as for `train_step`.
    """
    if model.router is None:
        raise ValueError("The model was prepared without router. Prepare it with router=harts.RouterLosses().")
    return count_step_load(
        model, StepMicrobatches.of(model, trajectories, execution, max_tokens_per_microbatch, plan, dp_rank)
    )


@torch.no_grad()
def record_routes(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> list[NDArray[np.int32]]:
    """The experts that the model's routers send every token to, to be replayed later as `Trajectory.routes`.

    Args:
        model: From `harts.prepare`.
        trajectories: As for `train_step`. Routes that they have are followed; give `replace(t, routes=None)` for the
            model's own.
        execution: As for `train_step`.
        max_tokens_per_microbatch: As for `train_step`.

    Returns:
        [L, M, A] int32 of every trajectory, in the order given.

    Raises:
        ValueError: If the model has no routers, or as for `train_step`.

    Example:
        >>> routes = harts.record_routes(model, trajectories)  # doctest: +SKIP
        >>> kept = [replace(t, routes=r) for t, r in zip(trajectories, routes)]  # doctest: +SKIP
    """
    if not model.routing.sites:
        raise ValueError("The model has no routers whose choices could be recorded.")
    step = StepMicrobatches.of(model, trajectories, execution, max_tokens_per_microbatch, None)
    shape = (step.batch.token_ids_F.size, len(model.routing.sites), model.routing.sites[0].num_active)
    routes_FMA = np.empty(shape, dtype=np.int32)
    for members, layout in step.layouts(model):
        recorder = model.routing.recorder(layout, step.whole, RouterLosses(), keep_choices=True)
        assert recorder is not None
        model.hidden_states(layout, recorder)
        place_F = ranges(step.batch.offsets[members], step.batch.length_N[members])
        routes_FMA[place_F] = recorder.choices()[layout.token_rows()]
    return np.split(routes_FMA, step.batch.offsets[1:-1])


def step_router_losses(model: TreeModel, step: StepMicrobatches) -> RouterLosses | None:
    """The model's, with the loads of the whole step where the loss needs them before the first microbatch."""
    losses = model.router
    if losses is None or losses.balance != "step" or losses.load is not None:
        return losses
    if step.plan.ranks > 1:
        raise ValueError(
            f'balance "step" needs the loads of all {step.plan.ranks} ranks before the first microbatch. Add up what '
            "harts.count_load gives on every rank, and pass the sum as RouterLosses.load."
        )
    return replace(losses, load=count_step_load(model, step))


@torch.no_grad()
def count_step_load(model: TreeModel, step: StepMicrobatches) -> RouterStatistics:
    """What the routers do with a step's microbatches of one rank, without gradients."""
    assert model.router is not None
    counting, routed = RouterLosses(count_weights=model.router.count_weights), []
    for _, layout in step.layouts(model):
        recorder = model.routing.recorder(layout, step.whole, counting)
        assert recorder is not None
        model.hidden_states(layout, recorder)
        routed.append(recorder.statistics())
    return model.routing.total(routed)
