"""A step's trajectories, checked, merged and placed: the layouts of its microbatches, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.layout.flat import FlatLayout, flat_layout
from harts.layout.packed import PackedLayout, pack
from harts.models import TreeModel
from harts.models.routing import StepColumns
from harts.plan.plan import Plan, make_plan
from harts.tree.prefix_tree import PrefixTree, build_prefix_tree, tree_from_lcp

Execution = Literal["tree", "flat"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepMicrobatches:
    """The trajectories of a step, checked, merged and placed."""

    batch: TrajectoryBatch
    """All trajectories, as columns; of a step that lies on several ranks, those that run here."""
    whole: StepColumns
    """Of the whole step: the batch, unless others run elsewhere."""
    tree: PrefixTree
    """Of the batch."""
    plan: Plan
    """Given, or made for one rank."""
    dp_rank: int
    """Rank of the plan whose microbatches run."""

    @classmethod
    def of(
        cls,
        model: TreeModel,
        trajectories: Sequence[Trajectory],
        execution: Execution,
        max_tokens_per_microbatch: int,
        plan: Plan | None,
        dp_rank: int = 0,
    ) -> StepMicrobatches:
        """Check, merge and place; arguments as for `train_step`.

        Raises:
            ValueError: As `train_step`.
        """
        check_execution(execution)
        batch = TrajectoryBatch.of(trajectories)
        batch.check_vocabulary(model.vocab_size)
        model.routing.check_routes(batch)
        tree = build_prefix_tree(batch)
        if plan is None:
            plan = make_plan(
                tree,
                max_tokens_per_microbatch=max_tokens_per_microbatch,
                cost=model.cost,
                sharing=execution == "tree",
            )
        _check_plan(plan, execution, dp_rank, batch.num_trajectories)
        return cls(batch=batch, whole=batch, tree=tree, plan=plan, dp_rank=dp_rank)

    def layouts(self, model: TreeModel) -> Iterator[tuple[NDArray[np.int64], PackedLayout | FlatLayout]]:
        """The trajectory numbers and the layout of every microbatch of the rank, one after the other."""
        for microbatch in self.plan.slots[self.dp_rank]:
            if not microbatch.trajectories:
                continue
            members = np.array(microbatch.trajectories, dtype=np.int64)
            if not self.plan.sharing:
                yield members, self._alone(model, members).to(model.device)
                continue
            part = self.tree.restrict(members).largest_first()
            # The tree's order, which a plan made elsewhere need not keep: packed streams follow it.
            yield part.order_N, pack(part, self.batch, model.needs).to(model.device)

    def _alone(self, model: TreeModel, members: NDArray[np.int64]) -> PackedLayout | FlatLayout:
        """Trajectories that share nothing."""
        if not model.needs.kernels.exact:
            return flat_layout(self.batch, members)
        # The model's own layers round elsewhere than those of trees, so exact mode runs the latter: each trajectory
        # as a tree without branches.
        chains = tree_from_lcp(members, self.batch.length_N[members], np.zeros_like(members))
        return pack(chains, self.batch, model.needs)


def check_execution(execution: str) -> None:
    """Raise a ValueError if there is no such execution."""
    if execution not in get_args(Execution):
        raise ValueError(f'execution is {execution!r}, expected "tree" or "flat".')


def _check_plan(plan: Plan, execution: Execution, dp_rank: int, num_trajectories: int) -> None:
    if plan.sharing != (execution == "tree"):
        raise ValueError(
            f'Got execution = "{execution}" and a plan with sharing = {plan.sharing}. '
            'Plan with sharing for "tree", without for "flat".'
        )
    if not 0 <= dp_rank < len(plan.slots):
        raise ValueError(f"Got dp_rank {dp_rank}, but the plan has {len(plan.slots)} ranks. Plan for as many as run.")
    planned = sorted(number for rank in plan.slots for microbatch in rank for number in microbatch.trajectories)
    if planned != list(range(num_trajectories)):
        raise ValueError(
            f"The plan places {len(planned)} trajectories, expected each of {num_trajectories} once. "
            "Make a plan from the tree of this step's trajectories."
        )
