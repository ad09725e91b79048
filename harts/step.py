"""One training step: trajectories in, gradients out. Read this file first.

    trajectories -> prefix tree -> plan -> packed layout -> hidden states -> log-probs of every trajectory -> loss

Each distinct token of a microbatch is computed once, forward and backward. The result, log-probs, loss and
gradients, is that of training every trajectory alone; `execution="flat"` does exactly that, through the same stages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.moe.recorder import RouterRecorder
from harts.layers.moe.statistics import RouterStatistics
from harts.layout.flat import FlatLayout
from harts.layout.packed import PackedLayout
from harts.logprobs import linear_logprobs, restore
from harts.microbatches import Execution, StepMicrobatches
from harts.models import TreeModel
from harts.objective import check_streams, loss_weights
from harts.objective.streams import Objective, PolicyStreams
from harts.plan.plan import Plan
from harts.routers import step_router_losses


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What a step computed. Gradients are in the parameters' `.grad`, added to what was there."""

    loss: float
    """The objective over the whole step; routers' losses are not in it."""
    metrics: dict[str, float]
    """The objective's metrics over the whole step."""
    logprobs_P: NDArray[np.float64]
    """[P] float64. Log-probs of the trained tokens, trajectory after trajectory, in the order given; NaN for those of
    other ranks."""
    num_tokens_flat: int
    """F, the tokens of all trajectories."""
    num_tokens_distinct: int
    """Tokens computed: the distinct ones of each microbatch (equals `num_tokens_flat` if flat)."""
    num_microbatches: int
    """Microbatches run."""
    num_rounds: int
    """Largest number of linear-attention rounds over the microbatches; 0 without linear attention or if flat (in exact
    mode 1)."""
    num_replayed: int
    """Tokens whose linear-attention state update was repeated, over all microbatches; 0 if flat."""
    router: RouterStatistics | None
    """What the routers of the rank's microbatches did, and their losses; None unless prepared with `router`."""
    seconds: float
    """Wall time of the step, planning included."""


def train_step(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    objective: Objective,
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
    plan: Plan | None = None,
    dp_rank: int = 0,
) -> StepResult:
    """Add the gradients of one step to the parameters of a prepared model.

    Args:
        model: From `harts.prepare`. Zero its gradients before and step the optimiser after, as usual.
        trajectories: All trajectories of the step.
        objective: What to minimise, such as `harts.grpo()`.
        execution: "tree" computes shared tokens once; "flat" computes every trajectory alone, with equal results.
        max_tokens_per_microbatch: Most tokens computed at once (distinct ones; padded ones if flat). At least the
            longest trajectory. Any value gives the same gradients; larger ones share more and need more memory.
        plan: Made before for these trajectories and this execution, instead of the limit. None plans for one rank.
        dp_rank: Rank of the plan whose microbatches run. Losses and gradients of all ranks add up to the step's.

    Raises:
        ValueError: If the trajectories, or their fit to the model, the objective, the limit or the plan, are wrong;
            the message names the trajectory, what was expected, and the fix.

    Example:
        >>> result = harts.train_step(model, trajectories, harts.grpo())  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """
    begin = time.perf_counter()
    step = StepMicrobatches.of(model, trajectories, execution, max_tokens_per_microbatch, plan, dp_rank)
    check_streams(objective, step.batch)
    # Over the whole step, so any plan gives one loss.
    loss_weight_P = loss_weights(step.batch, objective.normalization)
    return accumulate_gradients(model, step, objective, loss_weight_P=loss_weight_P, begin=begin)


def accumulate_gradients(
    model: TreeModel,
    step: StepMicrobatches,
    objective: Objective,
    *,
    loss_weight_P: NDArray[np.float64],
    begin: float,
) -> StepResult:
    """Run a rank's microbatches, forward and backward.

    Args:
        model: As for `train_step`.
        step: Of a plan.
        objective: As for `train_step`.
        loss_weight_P: [P] float64. Share of each trained token of the batch in the loss of the whole step.
        begin: When the step began, by `time.perf_counter`.
    """
    batch = step.batch
    router = step_router_losses(model, step)
    loss, metrics, logprobs_P, layouts, routed = 0.0, {}, np.full(batch.trained_P.size, np.nan), [], []
    for members, layout in step.layouts(model):
        recorder = model.routing.recorder(layout, step.whole, router)
        logprob_P, entropy_P = _logprobs(model, layout, recorder, with_entropy=objective.needs_entropy)
        output = objective(_streams(batch, members, loss_weight_P, logprob_P, entropy_P))
        output.loss.backward()
        loss += output.loss.item()
        metrics = {name: metrics.get(name, 0.0) + value.item() for name, value in output.metrics.items()}
        logprobs_P[batch.policy_tokens(members)] = logprob_P.detach().double().cpu().numpy()
        layouts.append(_LayoutSize.of(layout))
        routed += [] if recorder is None else [recorder.statistics()]
    return StepResult(
        loss=loss,
        metrics=metrics,
        logprobs_P=logprobs_P,
        num_tokens_flat=step.tree.num_trajectory_tokens,
        num_tokens_distinct=sum(size.tokens for size in layouts),
        num_microbatches=len(layouts),
        num_rounds=max((size.rounds for size in layouts), default=0),
        num_replayed=sum(size.replayed for size in layouts),
        router=None if router is None else model.routing.total(routed),
        seconds=time.perf_counter() - begin,
    )


def compute_logprobs(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    *,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
    plan: Plan | None = None,
) -> NDArray[np.float64]:
    """Log-probs of the trained tokens, without gradients: for reference or recomputed sampling streams.

    Args:
        model: From `harts.prepare`.
        trajectories: As for `train_step`; their log-prob streams are not read.
        execution: As for `train_step`.
        max_tokens_per_microbatch: As for `train_step`.
        plan: As for `train_step`, of one rank.

    Returns:
        [P] float64, trajectory after trajectory, in the order given.
    """
    return forward_logprobs(model, StepMicrobatches.of(model, trajectories, execution, max_tokens_per_microbatch, plan))


@torch.no_grad()
def forward_logprobs(model: TreeModel, step: StepMicrobatches) -> NDArray[np.float64]:
    """Run a rank's microbatches, forward alone.

    Args:
        model: As for `train_step`.
        step: Of a plan.

    Returns:
        [P] float64. Log-probs of the batch's trained tokens; NaN for those of other ranks.
    """
    logprobs_P = np.full(step.batch.trained_P.size, np.nan)
    for members, layout in step.layouts(model):
        logprob_P, _ = _logprobs(model, layout, model.routing.recorder(layout, step.whole))
        logprobs_P[step.batch.policy_tokens(members)] = logprob_P.double().cpu().numpy()
    return logprobs_P


def _logprobs(
    model: TreeModel,
    layout: PackedLayout | FlatLayout,
    recorder: RouterRecorder | None = None,
    *,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, if asked for, entropies of a microbatch's trained tokens, trajectory after trajectory."""
    hidden_TD = model.hidden_states(layout, recorder)
    with model.arithmetic():
        logprob_E, entropy_E = linear_logprobs(
            hidden_TD, model.head, layout.edges, with_entropy=with_entropy, logit_scale=model.logit_scale
        )
    entropy_P = None if entropy_E is None else restore(entropy_E, layout.edges.edge_P)
    return restore(logprob_E, layout.edges.edge_P), entropy_P


def _streams(
    batch: TrajectoryBatch,
    members: NDArray[np.int64],
    loss_weight_P: NDArray[np.float64],
    logprob_P: Tensor,
    entropy_P: Tensor | None,
) -> PolicyStreams:
    """A microbatch's part of the step's columns, as tensors beside its log-probs."""
    policy = batch.policy_tokens(members)

    def column(values_P: NDArray[np.float64] | None) -> Tensor | None:
        return None if values_P is None else torch.from_numpy(values_P[policy]).to(logprob_P)

    place = np.empty(batch.num_trajectories, dtype=np.int64)
    place[members] = np.arange(members.size)
    return PolicyStreams(
        logprobs_P=logprob_P,
        entropy_P=entropy_P,
        sampling_logprobs_P=column(batch.sampling_logprobs_P),
        ref_logprobs_P=column(batch.ref_logprobs_P),
        advantages_P=torch.from_numpy(batch.advantages_P[policy]).to(logprob_P),
        loss_weight_P=torch.from_numpy(loss_weight_P[policy]).to(logprob_P),
        trajectory_P=torch.from_numpy(place[batch.trajectory_P[policy]]).to(logprob_P.device),
        num_trajectories=members.size,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _LayoutSize:
    tokens: int
    rounds: int
    replayed: int

    @classmethod
    def of(cls, layout: PackedLayout | FlatLayout) -> _LayoutSize:
        if isinstance(layout, FlatLayout) or layout.runs is None:
            return cls(tokens=layout.num_tokens, rounds=0, replayed=0)
        return cls(tokens=layout.num_tokens, rounds=layout.runs.num_rounds, replayed=layout.runs.num_replayed)
