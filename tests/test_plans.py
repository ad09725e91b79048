"""Loss and gradients do not depend on the plan: any placement over ranks and slots adds up to the same step.

The ranks run one after the other in one process and their gradients add up in the parameters, as an all-reduce would.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import harts
from harts.data import TrajectoryBatch
from harts.models.tiny import tiny_model
from harts.plan import CostModel, Microbatch, Plan, make_plan
from harts.testing import assert_close, float64_throughout, gradients
from harts.tree import build_prefix_tree
from tests.cases import CASES, trajectories_of

COST = CostModel(flops_per_token=1.0, flops_per_pair=0.01)
OBJECTIVE = harts.gspo(clip_low=0.2, clip_high=0.2, kl_coef=0.1, normalization="group")
"""Sequence-level ratios and normalisers by group: both need more than the tokens of one microbatch."""
NAMED = {case.name: case for case in CASES}


def random_plan(base: Plan, *, ranks: int, slots: int, seed: int) -> Plan:
    """Every trajectory anywhere; some microbatches stay empty."""
    rng = np.random.default_rng(seed)
    numbers = [i for rank in base.slots for m in rank for i in m.trajectories]
    cells: list[list[int]] = [[] for _ in range(ranks * slots)]
    for number in rng.permutation(numbers).tolist():
        cells[rng.integers(len(cells))].append(number)
    made = [
        Microbatch(trajectories=tuple(cell), num_tokens=0, num_trajectory_tokens=0, predicted_work=0.0)
        for cell in cells
    ]
    return replace(base, slots=tuple(tuple(made[r * slots : (r + 1) * slots]) for r in range(ranks)))


@pytest.mark.parametrize("execution", ["tree", "flat"])
@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("worked_example", "qwen3_5_text"),
        ("depth_beyond_two", "qwen3_5_text"),
        ("one_sample_a_call", "qwen3_next"),
        ("ends_inside_and_duplicates", "qwen3"),
    ],
)
def test_random_plans_over_several_ranks_give_the_step_of_one_microbatch(name, model_type, execution):
    model = harts.prepare(tiny_model(model_type, dtype=torch.float64))
    trajectories = trajectories_of(NAMED[name])
    tree = build_prefix_tree(TrajectoryBatch.of(trajectories))
    total = tree.num_trajectory_tokens * 10
    plan = make_plan(tree, max_tokens_per_microbatch=total, cost=COST, sharing=execution == "tree")
    with float64_throughout():
        whole = harts.train_step(model, trajectories, OBJECTIVE, execution=execution, plan=plan)
        expected = gradients(model.module)
        planned = make_plan(
            tree,
            max_tokens_per_microbatch=int(2 * tree.length_N.max()),
            cost=COST,
            ranks=2,
            sharing=execution == "tree",
        )
        others = [random_plan(plan, ranks=r, slots=s, seed=r + s) for r, s in ((1, 3), (3, 2), (4, 1))]
        for other in [planned, *others]:
            model.module.zero_grad()
            parts = [
                harts.train_step(model, trajectories, OBJECTIVE, execution=execution, plan=other, dp_rank=rank)
                for rank in range(other.ranks)
            ]
            assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-10, abs=1e-14)
            logprobs_RP = np.stack([part.logprobs_P for part in parts])
            assert (np.isfinite(logprobs_RP).sum(axis=0) == 1).all()
            np.testing.assert_allclose(np.nansum(logprobs_RP, axis=0), whole.logprobs_P, rtol=1e-10)
            for parameter, gradient in gradients(model.module).items():
                assert_close(parameter, expected[parameter], gradient, ratio=1e-10, scale=1.0)


def test_a_plan_that_does_not_fit_is_named():
    model = harts.prepare(tiny_model("qwen3"))
    trajectories = trajectories_of(NAMED["worked_example"])
    tree = build_prefix_tree(TrajectoryBatch.of(trajectories))
    plan = make_plan(tree, max_tokens_per_microbatch=8, cost=COST)
    with pytest.raises(ValueError, match="dp_rank 1, but the plan has 1"):
        harts.train_step(model, trajectories, OBJECTIVE, plan=plan, dp_rank=1)
    with pytest.raises(ValueError, match="sharing = True"):
        harts.train_step(model, trajectories, OBJECTIVE, plan=plan, execution="flat")
    with pytest.raises(ValueError, match="places 4 trajectories, expected each of 3 once"):
        harts.train_step(model, trajectories[:3], OBJECTIVE, plan=plan)
