"""Properties of plans for several ranks, recounted from the words, and bars against proved optima."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.plan import CostModel, Plan, capacity, make_plan, search
from harts.plan.bounds import _fewest_bins, _least_total, lower_bound
from harts.plan.differencing import differencing
from harts.plan.problem import make_problem
from harts.plan.slots import recount
from harts.tree import PrefixTree, build_prefix_tree, tree_from_lcp
from tests.plan.exact import exhaustive_optimum, proved_optimum
from tests.plan.families import COST, FAMILIES, problem_of, small_tree

WORDS = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=9)
SMALL_COST = CostModel(flops_per_token=0.3, flops_per_pair=0.05, flops_per_microbatch=0.7)
INTEGER_COST = CostModel(flops_per_token=30.0, flops_per_pair=1.0, flops_per_microbatch=100.0)
UNIT_COST = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
CLOSE = 1 + 1e-9
few = settings(max_examples=25)


def tree_of(words: list[str]) -> PrefixTree:
    return build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))


def plan_of(words: list[str], spare: int, ranks: int, *, barrier: bool = True) -> Plan:
    limit = max(map(len, words)) + spare
    return make_plan(tree_of(words), max_tokens_per_microbatch=limit, cost=SMALL_COST, ranks=ranks, barrier=barrier)


def distinct(words: list[str]) -> set[str]:
    return {word[: d + 1] for word in words for d in range(len(word))}


@few
@given(WORDS, st.integers(0, 12), st.integers(1, 5), st.booleans())
def test_slots_hold_each_trajectory_once_and_work_is_that_of_their_trees(words, spare, ranks, barrier):
    plan, tree = plan_of(words, spare, ranks, barrier=barrier), tree_of(words)
    microbatches = [m for rank in plan.slots for m in rank]
    assert sorted(i for m in microbatches for i in m.trajectories) == list(range(len(words)))
    assert plan.ranks == ranks and {len(rank) for rank in plan.slots} == {plan.num_slots}
    for m in microbatches:
        members = [words[i] for i in m.trajectories]
        assert m.num_tokens == len(distinct(members)) <= plan.max_tokens_per_microbatch
        assert m.num_trajectory_tokens == sum(map(len, members))
        assert m.predicted_work == (SMALL_COST.tree_work(tree.restrict(m.trajectories)) if members else 0)
    inside = sum(any(o != w and o.startswith(w) for o in words) for w in set(words))
    num_jobs = len(set(words)) - inside
    assert sum(not m.trajectories for m in microbatches) == max(0, len(microbatches) - num_jobs)


@few
@given(WORDS, st.integers(0, 12), st.integers(1, 5), st.booleans())
def test_makespan_follows_from_the_slots_and_is_between_bound_and_peers(words, spare, ranks, barrier):
    plan = plan_of(words, spare, ranks, barrier=barrier)
    work_RS = np.array([[m.predicted_work for m in rank] for rank in plan.slots])
    height = work_RS.max(axis=0).sum() if barrier else work_RS.sum(axis=1).max()
    assert plan.makespan == pytest.approx(height + 0.7 * plan.num_slots)
    assert plan.lower_bound <= plan.makespan * CLOSE
    assert set(plan.peers) == {"greedy", "whole_trees", "contiguous", "sequences"}
    assert all(plan.makespan <= peer * CLOSE for peer in plan.peers.values())


@few
@given(WORDS, st.integers(0, 8), st.integers(1, 4), st.booleans(), st.data())
def test_order_duplicates_and_prefixes_change_nothing(words, spare, ranks, barrier, data):
    plan = plan_of(words, spare, ranks, barrier=barrier)
    shuffled = data.draw(st.permutations(words))
    assert plan_of(shuffled, spare, ranks, barrier=barrier).makespan == plan.makespan
    word = data.draw(st.sampled_from(words))
    free = word[: data.draw(st.integers(1, len(word)))]
    more = plan_of([*words, free], spare, ranks, barrier=barrier)
    assert more.makespan == pytest.approx(plan.makespan, rel=1e-9)
    assert more.lower_bound == plan.lower_bound and more.peers == plan.peers


@few
@given(WORDS, st.integers(0, 8))
def test_one_rank_repeats_nothing_that_fits(words, spare):
    # Without the packing, which takes ten seconds to compile.
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(capacity, "pack_tokens")
        plan = plan_of(words, len(distinct(words)) + spare, 1)
    assert plan.num_slots == 1
    assert plan.slots[0][0].num_tokens == len(distinct(words))


@few
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 8), st.integers(1, 3))
def test_bound_holds_for_the_best_of_all_partitions(words, spare, ranks):
    limit = max(map(len, words)) + spare
    problem = make_problem(tree_of(words), cost=SMALL_COST, ranks=ranks, limit=limit, barrier=True)
    best = exhaustive_optimum(problem)
    assert lower_bound(problem).makespan <= best + problem.rounding
    plan = make_plan(tree_of(words), max_tokens_per_microbatch=limit, cost=SMALL_COST, ranks=ranks)
    assert plan.makespan >= best * problem.unit / CLOSE


@few
@given(WORDS, st.integers(0, 8), st.integers(1, 4))
def test_bound_is_the_least_capacity_that_is_enough_for_its_even_share(words, spare, ranks):
    limit = max(map(len, words)) + spare
    problem = make_problem(tree_of(words), cost=UNIT_COST, ranks=ranks, limit=limit, barrier=False)
    work_end_S, own_S = problem.path_D[problem.end_S], problem.own_S
    count_S, _ = _fewest_bins(problem.parent_S, problem.end_S, problem.size_S, limit)
    capacity = int(problem.length_J.max())
    while _least_total(problem.parent_S, work_end_S, own_S, count_S, capacity) > ranks * capacity:
        capacity += 1
    assert lower_bound(problem).work == capacity


def test_bound_counts_the_prefix_of_every_microbatch_of_a_slot():
    # Five leaves of 3 + 4 tokens, two to a microbatch: three microbatches, so two slots of two ranks. The slots take
    # (2 x 2 x 3 + 5 x 4) / 2 at least; the fourth prefix is what three microbatches alone would not give.
    problem = make_problem(
        tree_from_lcp(range(5), [7] * 5, [0, 3, 3, 3, 3]),
        cost=CostModel(flops_per_token=1.0, flops_per_pair=0.0),
        ranks=2,
        limit=11,
        barrier=True,
    )
    bound = lower_bound(problem)
    assert (bound.slots, bound.work) == (2, 16)
    assert exhaustive_optimum(problem) == 18


def test_plans_are_the_same_every_time():
    tree = FAMILIES["agent"](np.random.default_rng(3), 60)
    limit = 2 * int(tree.length_N.max())
    plans = [make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=4) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    # The same on every machine: stored from another run.
    assert plans[0].digest[:16] == "45e4e23be67f2813"


def test_an_impossible_number_of_ranks_is_named():
    with pytest.raises(ValueError, match="Got 0 ranks"):
        plan_of(["a"], 0, 0)


def test_imbalance_is_that_of_the_slots():
    # Slots (5, 4) and (3, 1) without sharing: 5 / 4.5 and 3 / 2.
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
    tree = tree_from_lcp(range(4), [5, 4, 3, 1], [0, 0, 0, 0])
    plan = make_plan(tree, max_tokens_per_microbatch=5, cost=cost, ranks=2, sharing=False)
    assert [[m.num_tokens for m in rank] for rank in plan.slots] == [[5, 3], [4, 1]]
    assert plan.imbalance_p95 == 0.5
    assert make_plan(tree, max_tokens_per_microbatch=20, cost=cost).imbalance_p95 == 0


@few
@given(WORDS, st.integers(0, 12), st.integers(1, 4), st.booleans())
def test_padded_batches_keep_the_limit_on_all_ranks(words, spare, ranks, barrier):
    limit = max(map(len, words)) + spare
    plan = make_plan(
        tree_of(words), max_tokens_per_microbatch=limit, cost=SMALL_COST, ranks=ranks, barrier=barrier, sharing=False
    )
    microbatches = [m for rank in plan.slots for m in rank]
    assert sorted(i for m in microbatches for i in m.trajectories) == list(range(len(words)))
    for m in microbatches:
        members = [words[i] for i in m.trajectories]
        assert len(members) * max(map(len, members), default=0) <= limit
    assert sum(not m.trajectories for m in microbatches) == max(0, len(microbatches) - len(words))
    assert plan.lower_bound <= plan.makespan * CLOSE


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 4))
def test_differencing_puts_each_value_in_a_part(values, parts):
    part = differencing(np.array(values, dtype=np.int64), parts)
    assert part.size == len(values) and set(part.tolist()) <= set(range(parts))


def test_differencing_example_of_the_literature():
    values = np.array([8, 7, 6, 5, 4])
    part = differencing(values, 2)
    assert sorted(int(values[part == i].sum()) for i in range(2)) == [14, 16]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("ranks", "barrier"), [(3, True), (8, False)])
def test_no_member_of_the_portfolio_is_better(family, ranks, barrier):
    tree = FAMILIES[family](np.random.default_rng(1), 48)
    limit = 2 * int(tree.length_N.max())
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=ranks, barrier=barrier)
    assert all(plan.makespan <= peer * CLOSE for peer in plan.peers.values())
    assert plan.lower_bound <= plan.makespan * CLOSE


@pytest.mark.parametrize(("family", "shorter"), [("search_tree", 0.996), ("pareto", 0.996)])
def test_large_steps_are_shorter_with_alternatives(family, shorter):
    problem = problem_of(family, ranks=16, leaves=6000)
    found = search.search(problem, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "NEAR", math.inf)
        without = search.search(problem, seed=0)
    assert found.schedule.makespan < shorter * without.schedule.makespan
    assert recount(problem, found.schedule.bin_J)[1].max() <= problem.limit


@pytest.mark.slow
def test_small_steps_are_within_one_per_cent_of_proved_optima():
    if importlib.util.find_spec("ortools") is None:
        pytest.skip("needs ortools")
    ratios: list[float] = []
    seed = 0
    while len(ratios) < 40:
        rng = np.random.default_rng(seed)
        num, ranks = int(rng.integers(8, 15)), int(rng.integers(2, 5))
        tree = small_tree(rng, num)
        limit = int(tree.length_N.max() * rng.uniform(1, 3))
        plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=INTEGER_COST, ranks=ranks)
        problem = make_problem(tree, cost=INTEGER_COST, ranks=ranks, limit=limit, barrier=True)
        best = proved_optimum(problem, num_slots=plan.num_slots + 1, start=round(plan.makespan), seconds=20)
        if best is not None:
            assert plan.lower_bound <= best * problem.unit * CLOSE
            ratios.append(plan.makespan / (best * problem.unit))
        seed += 1
    assert (np.mean(ratios) <= 1.01, max(ratios) <= 1.05) == (True, True), ratios


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_medium_steps_are_near_the_bound(family):
    ratios = []
    for seed in range(6):
        tree = FAMILIES[family](np.random.default_rng(seed), 500)
        limit = 2 * int(tree.length_N.max())
        for ranks in (4, 8, 16):
            plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=ranks)
            ratios.append(plan.makespan / plan.lower_bound)
    assert (np.mean(ratios) <= 1.05, max(ratios) <= 1.16) == (True, True), ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ranks"), [("grpo", 64), ("grpo", 256), ("agent", 64), ("agent", 256), ("pareto", 64)]
)
def test_large_steps_are_within_one_and_a_half_per_cent_of_the_bound(family, ranks):
    tree = FAMILIES[family](np.random.default_rng(0), 100_000)
    limit = 2 * int(tree.length_N.max())
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=ranks)
    assert plan.makespan <= 1.015 * plan.lower_bound
