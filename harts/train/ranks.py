"""One training step whose trajectories live on several ranks: each plans for all, and runs its own slots of the plan.

trajectories of this rank -> tree of all -> plan, compared -> trajectories to where they run -> gradients
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.data.exchange import Exchange
from harts.data.redistribute import gather_records, redistribute, return_values
from harts.microbatches import Execution, StepMicrobatches, check_execution
from harts.models import TreeModel
from harts.objective.normalization import token_shares
from harts.objective.requirements import check_streams
from harts.objective.streams import Objective
from harts.plan.agreement import check_agreement
from harts.plan.plan import Microbatch, Plan, make_plan
from harts.step import StepResult, accumulate_gradients
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
        model: From `harts.prepare`, with equal parameters on all ranks; without losses of routers.
        trajectories: That live on this rank; may be none. They run where the plan puts them.
        objective: The same on all ranks.
        exchange: With the other data-parallel ranks.
        numbers: Number of each in the step, as for `prefix_tree_across_ranks`.
        execution: As for `harts.train_step`.
        max_tokens_per_microbatch: As for `harts.train_step`.

    Returns:
        Loss, metrics and sizes of what ran here; log-probs of the trajectories that live here, in the order given.

    Raises:
        ValueError: As `harts.train_step` and `prefix_tree_across_ranks`, or if the plans of the ranks differ.
    """
    begin = time.perf_counter()
    check_execution(execution)
    if model.router is not None:
        raise ValueError(
            "The model was prepared with router, but losses and loads of routers need the whole step on every rank. "
            "Prepare it without, or give every rank all trajectories and run harts.train_step(..., plan=, dp_rank=)."
        )
    found = prefix_tree_across_ranks(trajectories, exchange, numbers=numbers)
    plan = make_plan(
        found.tree,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        cost=model.cost,
        ranks=exchange.ranks,
        barrier=False,  # ranks wait for each other once, when gradients are summed
        sharing=execution == "tree",
    )
    check_agreement(plan, exchange)
    records = gather_records(trajectories, exchange, found.numbers, rank_N=found.rank_N, length_N=found.length_N)
    share_N = token_shares(records.weight_N, records.count_N, records.group_N, objective.normalization)
    target_N = _targets(plan)
    here = redistribute(trajectories, exchange, records, target_N)
    result = _nothing()
    if here:
        step = _own_step(model, here, found.tree, plan, exchange.rank)
        check_streams(objective, step.batch)
        loss_weight_P = share_N[target_N == exchange.rank][step.batch.trajectory_P]
        result = accumulate_gradients(model, step, objective, loss_weight_P=loss_weight_P, begin=begin)
    logprobs_P = return_values(result.logprobs_P, exchange, records, target_N)
    return replace(result, logprobs_P=logprobs_P, seconds=time.perf_counter() - begin)


def _targets(plan: Plan) -> NDArray[np.int64]:
    """[N] int64, by number. Rank that runs each trajectory."""
    members = [[number for microbatch in rank for number in microbatch.trajectories] for rank in plan.slots]
    target_N = np.empty(sum(map(len, members)), dtype=np.int64)
    for rank, numbers in enumerate(members):
        target_N[numbers] = rank
    return target_N


def _own_step(
    model: TreeModel, here: Sequence[Trajectory], tree: PrefixTree, plan: Plan, rank: int
) -> StepMicrobatches:
    """The step of this rank's slots alone, its trajectories counted by ascending number in the whole step."""
    batch = TrajectoryBatch.of(here)
    batch.check_vocabulary(model.vocab_size)
    model.routing.check_routes(batch)
    ran = np.sort([number for microbatch in plan.slots[rank] for number in microbatch.trajectories])
    part = tree.restrict(ran)
    slots = tuple(_renumbered(microbatch, ran) for microbatch in plan.slots[rank])
    return StepMicrobatches(
        batch=batch,
        tree=replace(part, order_N=np.searchsorted(ran, part.order_N)),
        plan=replace(plan, slots=(slots,)),
        dp_rank=0,
    )


def _renumbered(microbatch: Microbatch, ran: NDArray[np.int64]) -> Microbatch:
    return replace(microbatch, trajectories=tuple(np.searchsorted(ran, microbatch.trajectories).tolist()))


def _nothing() -> StepResult:
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
        router=None,
        seconds=0.0,
    )
