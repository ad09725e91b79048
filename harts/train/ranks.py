"""One training step whose trajectories live on several ranks: each plans for all, and runs its own slots of the plan.

trajectories of this rank -> tree of all -> plan, compared -> trajectories to where they run -> gradients, or log-probs
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.data.exchange import Exchange
from harts.data.fail_together import FailTogether
from harts.data.redistribute import TrajectoryRecords, bits_to_move, gather_records, redistribute, return_values
from harts.microbatches import Execution, StepMicrobatches, check_execution
from harts.models import TreeModel
from harts.objective.normalization import token_shares
from harts.objective.requirements import check_streams
from harts.objective.streams import Objective
from harts.plan.agreement import check_agreement
from harts.plan.locality import Holdings, run_where_held, running_ranks
from harts.plan.plan import Microbatch, Plan, make_plan
from harts.plan.swaps import swap_home
from harts.routers import count_step_load
from harts.step import StepResult, accumulate_gradients, forward_logprobs
from harts.tree import PrefixTree
from harts.tree.across_ranks import prefix_tree_across_ranks


def train_step_across_ranks(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    objective: Objective,
    exchange: Exchange,
    *,
    numbers: Sequence[int] | None = None,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> StepResult:
    """Add this rank's share of the gradients of one step to the parameters of a prepared model.

    Equals `harts.train_step` with the trajectories of all ranks: gradients and losses of the ranks add up to that
    step's. Follow it with `harts.train.distributed.sum_gradients`.

    Args:
        model: From `harts.prepare`, with equal parameters on all ranks.
        trajectories: That live on this rank; may be none. They run where the plan puts them.
        objective: The same on all ranks.
        exchange: With the other data-parallel ranks.
        numbers: Number of each in the step, as for `prefix_tree_across_ranks`.
        execution: As for `harts.train_step`.
        max_tokens_per_microbatch: As for `harts.train_step`.

    Returns:
        Loss, metrics and sizes of what ran here; log-probs of the trajectories that live here, in the order given.

    Raises:
        ValueError: On all ranks: as `harts.train_step` and `prefix_tree_across_ranks`, or if the plans of the ranks
            differ. What is wrong with a trajectory is said by the rank that holds it; the others name that rank.
        RankFailedError: If another rank raised something else. Gradients are then those of a part of the step.
    """
    begin = time.perf_counter()
    with FailTogether(exchange) as together:
        placed = _place(
            model,
            trajectories,
            together,
            objective=objective,
            numbers=numbers,
            execution=execution,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        records, step = placed.records, placed.step
        share_N = token_shares(records.weight_N, records.count_N, records.group_N, objective.normalization)
        model = _with_load(model, step, together)
        result = _nothing(model)
        if step is not None:
            loss_weight_P = share_N[placed.target_N == exchange.rank][step.batch.trajectory_P]
            result = accumulate_gradients(model, step, objective, loss_weight_P=loss_weight_P, begin=begin)
        logprobs_P = return_values(result.logprobs_P, together, records, placed.target_N)
    return replace(result, logprobs_P=logprobs_P, seconds=time.perf_counter() - begin)


def compute_logprobs_across_ranks(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    exchange: Exchange,
    *,
    numbers: Sequence[int] | None = None,
    execution: Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> NDArray[np.float64]:
    """Log-probs of the trained tokens, without gradients, of trajectories that live on several ranks.

    Equals `harts.compute_logprobs` with the trajectories of all ranks: for reference or recomputed sampling streams.

    Args:
        model: From `harts.prepare`, with equal parameters on all ranks.
        trajectories: That live on this rank; may be none. Advantages and log-prob streams are neither read nor sent.
        exchange: As for `train_step_across_ranks`.
        numbers: As for `train_step_across_ranks`.
        execution: As for `harts.train_step`.
        max_tokens_per_microbatch: As for `harts.train_step`.

    Returns:
        [P] float64, of the trajectories that live here, one after the other, in the order given.

    Raises:
        ValueError: On all ranks, as `train_step_across_ranks`.
        RankFailedError: As `train_step_across_ranks`.
    """
    with FailTogether(exchange) as together:
        placed = _place(
            model,
            trajectories,
            together,
            objective=None,
            numbers=numbers,
            execution=execution,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        logprobs_P = np.zeros(0) if placed.step is None else forward_logprobs(model, placed.step)
        returned_P = return_values(logprobs_P, together, placed.records, placed.target_N)
    return returned_P


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _PlacedStep:
    """A step whose trajectories are where they run."""

    step: StepMicrobatches | None
    """What runs here; None if nothing does."""
    records: TrajectoryRecords
    """Of all trajectories."""
    target_N: NDArray[np.int64]
    """[N] int64, by number. Rank that runs each trajectory."""


def _place(
    model: TreeModel,
    trajectories: Sequence[Trajectory],
    exchange: Exchange,
    *,
    objective: Objective | None,
    numbers: Sequence[int] | None,
    execution: Execution,
    max_tokens_per_microbatch: int,
) -> _PlacedStep:
    """Check, merge, plan and send; arguments as for `train_step_across_ranks`, None for log-probs alone."""
    check_execution(execution)
    found = prefix_tree_across_ranks(
        trajectories, exchange, numbers=numbers, check=partial(_check_fit, model, objective)
    )
    if objective is None:
        trajectories = [_without_streams(trajectory) for trajectory in trajectories]
    tree = found.tree
    records = gather_records(trajectories, exchange, found.numbers, rank_N=found.rank_N, length_N=found.length_N)
    plan = make_plan(
        tree,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        cost=model.cost,
        ranks=exchange.ranks,
        barrier=False,  # ranks wait for each other once, when gradients are summed
        sharing=execution == "tree",
    )
    bits_N, bits_per_token = bits_to_move(records)
    holdings = Holdings(rank_N=found.rank_N, bits_N=bits_N, bits_per_token=bits_per_token)
    plan = swap_home(run_where_held(plan, tree, holdings), tree, holdings, cost=model.cost)
    check_agreement(plan, exchange)
    target_N = running_ranks(plan)
    here = redistribute(trajectories, exchange, records, target_N, order_N=tree.order_N, lcp_N=tree.lcp_N)
    step = _own_step(here, records, tree, plan=plan, rank=exchange.rank) if here else None
    return _PlacedStep(step=step, records=records, target_N=target_N)


def _check_fit(model: TreeModel, objective: Objective | None, batch: TrajectoryBatch) -> None:
    """Raise a ValueError if a rank's own trajectories do not fit the model or the objective."""
    batch.check_vocabulary(model.vocab_size)
    model.routing.check_routes(batch)
    if objective is not None:
        check_streams(objective, batch)


def _without_streams(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, advantages=np.zeros(len(trajectory)), sampling_logprobs=None, ref_logprobs=None)


def _own_step(
    here: Sequence[Trajectory], whole: TrajectoryRecords, tree: PrefixTree, *, plan: Plan, rank: int
) -> StepMicrobatches:
    """The step of this rank's slots alone, its trajectories counted by ascending number in the whole step."""
    ran = np.sort([number for microbatch in plan.slots[rank] for number in microbatch.trajectories])
    part = tree.restrict(ran)
    slots = tuple(_renumbered(microbatch, ran) for microbatch in plan.slots[rank])
    return StepMicrobatches(
        batch=TrajectoryBatch.of(here),
        whole=whole,
        tree=replace(part, order_N=np.searchsorted(ran, part.order_N)),
        plan=replace(plan, slots=(slots,)),
        dp_rank=0,
    )


def _with_load(model: TreeModel, step: StepMicrobatches | None, exchange: Exchange) -> TreeModel:
    """The model with the loads of the whole step, where its load-balancing loss needs them before a microbatch."""
    losses = model.router
    if losses is None or losses.balance != "step" or losses.load is not None:
        return model
    own = model.routing.total([]) if step is None else count_step_load(model, step)
    message = np.append(own.load_MX, own.num_tokens)
    # Added up in the order of the ranks, so that all have the same bits.
    total = np.sum(exchange.all_gather(message, [message.size] * exchange.ranks), axis=0)
    load = replace(own, load_MX=total[:-1].reshape(own.load_MX.shape), num_tokens=float(total[-1]))
    return replace(model, router=replace(losses, load=load))


def _renumbered(microbatch: Microbatch, ran: NDArray[np.int64]) -> Microbatch:
    return replace(microbatch, trajectories=tuple(np.searchsorted(ran, microbatch.trajectories).tolist()))


def _nothing(model: TreeModel) -> StepResult:
    """The result of a rank that has nothing to run."""
    return StepResult(
        loss=0.0,
        metrics={},
        logprobs_P=np.zeros(0),
        num_tokens_flat=0,
        num_tokens_distinct=0,
        num_microbatches=0,
        num_rounds=0,
        num_replayed=0,
        router=None if model.router is None else model.routing.total([]),
        seconds=0.0,
    )
