"""Played plans: rank-time adds up, and each reason for waste shows where it is the only one."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan import CostModel, make_plan
from harts.plan.cost import CostParameters
from harts.plan.sharing import ExecutionCosts
from harts.plan.simulate import WORKLOADS, microbatch_trees, play
from harts.plan.size import size_of_tree
from harts.tree import PrefixTree, tree_from_lcp

TOKENS = CostParameters(per_token=1.0)
PLANNED = CostModel(flops_per_token=1.0, flops_per_pair=0.0)


def costs(parameters: CostParameters = TOKENS, chunk_size: int | None = None) -> ExecutionCosts:
    return ExecutionCosts(tree=parameters, flat=parameters, chunk_size=chunk_size)


def forest(*lengths: int, lcp: tuple[int, ...] | None = None) -> PrefixTree:
    return tree_from_lcp(np.arange(len(lengths)), lengths, lcp or (0,) * len(lengths))


def test_even_trajectories_keep_every_rank_busy():
    tree = forest(10, 10, 10, 10)
    played = play(make_plan(tree, max_tokens_per_microbatch=10, cost=PLANNED, ranks=2), tree, costs())
    assert (played.seconds, played.useful, played.waiting, played.repeated) == (20, 1, 0, 0)
    assert (played.bound_over_ideal, played.limit) == (1, "nothing")


def test_one_long_trajectory_makes_the_other_rank_wait():
    tree = forest(30, 10)
    played = play(make_plan(tree, max_tokens_per_microbatch=30, cost=PLANNED, ranks=2), tree, costs())
    assert (played.seconds, played.waiting, played.bound_over_ideal) == (30, pytest.approx(1 / 3), 1.5)
    assert played.limit == "waiting, most of it unavoidable"


def test_a_shared_prefix_is_repeated_on_the_second_rank():
    tree = forest(15, 15, lcp=(0, 10))
    played = play(make_plan(tree, max_tokens_per_microbatch=15, cost=PLANNED, ranks=2), tree, costs())
    assert (played.seconds, played.repeated, played.waiting) == (15, pytest.approx(1 / 3), 0)
    assert played.limit.startswith("prefixes computed on several ranks")


def test_overheads_and_rounds_count_as_passes():
    tree = forest(6, 6, lcp=(0, 4))
    parameters = CostParameters(per_token=1.0, per_round=3.0, per_microbatch=5.0)
    played = play(make_plan(tree, max_tokens_per_microbatch=8, cost=PLANNED), tree, costs(parameters, chunk_size=2))
    assert played.seconds == 8 + 2 * 3 + 5
    assert (played.useful, played.passes) == (pytest.approx(8 / 19), pytest.approx(11 / 19))
    assert played.limit == "overheads and rounds"


@pytest.mark.parametrize("name", WORKLOADS)
def test_shares_add_up_and_parts_are_the_plans(name):
    tree = WORKLOADS[name](200, seed=1)
    limit = int(1.5 * tree.length_N.max())
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=PLANNED, ranks=3)
    parts = [part for part in microbatch_trees(plan, tree) if part is not None]
    microbatches = [m for rank in plan.slots for m in rank if m.trajectories]
    assert [part.num_tokens for part in parts] == [m.num_tokens for m in microbatches]
    for part, microbatch in zip(parts, microbatches, strict=True):
        alone = tree.restrict(microbatch.trajectories)
        assert (part.lcp_N == alone.lcp_N).all()
    parameters = CostParameters(per_token=1.0, per_pair=0.001, per_run=20.0, per_round=9.0, per_microbatch=100.0)
    played = play(plan, tree, costs(parameters, chunk_size=64))
    assert played.useful + played.repeated + played.passes + played.waiting == pytest.approx(1)
    assert min(played.useful, played.repeated, played.waiting) >= 0
    predicted = [parameters.predict(size_of_tree(part, chunk_size=64)) for part in parts]
    assert played.seconds * plan.ranks >= sum(predicted) > 0


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_as_many_trajectories_as_asked_for_and_share(name):
    tree = WORKLOADS[name](1000, seed=0)
    assert tree.length_N.size == 1000
    assert tree.num_trajectory_tokens > 1.2 * tree.num_tokens
    assert not np.array_equal(tree.length_N, WORKLOADS[name](1000, seed=1).length_N)


def test_jitter_slows_a_step_with_barriers_and_is_repeatable():
    tree = forest(*[10] * 64)
    plan = make_plan(tree, max_tokens_per_microbatch=10, cost=PLANNED, ranks=32)
    noisy = [play(plan, tree, costs(), jitter=0.1, seed=seed).seconds for seed in (0, 0, 1)]
    assert noisy[0] == noisy[1] != noisy[2]
    assert min(noisy) > play(plan, tree, costs()).seconds


def test_a_flat_plan_is_refused():
    tree = forest(3, 3)
    plan = make_plan(tree, max_tokens_per_microbatch=6, cost=PLANNED, sharing=False)
    with pytest.raises(ValueError, match="sharing=True"):
        play(plan, tree, costs())
