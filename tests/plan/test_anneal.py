"""Annealing: fewer bins than packing needs, and slots made even."""

from __future__ import annotations

import numpy as np

from harts.plan.anneal import Style, anneal, level
from harts.plan.capacity import pack_tokens
from harts.plan.cost import CostModel
from harts.plan.pack import FIRST_FIT
from harts.plan.problem import Problem, make_problem
from harts.plan.slots import recount, schedule
from harts.tree import tree_from_lcp
from tests.plan.families import COST, FAMILIES


def flat_problem(lengths: list[int], *, ranks: int, limit: int) -> Problem:
    tree = tree_from_lcp(np.arange(len(lengths)), lengths, [0] * len(lengths))
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
    return make_problem(tree, cost=cost, ranks=ranks, limit=limit, barrier=True)


def test_bins_beyond_the_limit_are_repaired():
    # First fit in descending order opens four bins of 10 for 5, 4, 4, 3, 3, 3, 3, 3, 2; three are enough.
    problem = flat_problem([5, 4, 4, 3, 3, 3, 3, 3, 2], ranks=1, limit=10)
    packed_J = pack_tokens(problem, rule=FIRST_FIT)
    assert packed_J.max() == 3
    found_J = anneal(problem, packed_J % 3, num_bins=3, moves=20_000, seed=0, style=Style(0.5, 0.3))
    assert found_J is not None
    assert recount(problem, found_J)[1].tolist() == [10, 10, 10]


def test_no_plan_within_the_limit_is_no_plan():
    problem = flat_problem([6, 6, 6], ranks=1, limit=10)
    assert anneal(problem, np.array([0, 1, 1]), num_bins=2, moves=2000, seed=0, style=Style(0.5, 0.0)) is None


def test_leveling_makes_slots_even_and_nothing_worse():
    tree = FAMILIES["grpo"](np.random.default_rng(0), 96)
    problem = make_problem(tree, cost=COST, ranks=4, limit=2 * int(tree.length_N.max()), barrier=True)
    start = schedule(problem, pack_tokens(problem, rule=FIRST_FIT))
    leveled_J = level(problem, start.bin_J, num_bins=start.work_B.size, moves=20_000, seed=0)
    leveled = schedule(problem, leveled_J)
    assert leveled.makespan < start.makespan or leveled.work_B.sum() <= start.work_B.sum()
    assert leveled.makespan <= start.makespan
    assert recount(problem, leveled_J)[1].max() <= problem.limit

    def worst(work_B: np.ndarray) -> float:
        work_SR = np.sort(work_B)[::-1].reshape(-1, problem.ranks)
        return float((work_SR[:, 0] / work_SR.mean(axis=1)).max())

    assert worst(leveled.work_B) < worst(start.work_B)


def test_leveling_repeats_a_prefix_where_that_makes_the_step_shorter():
    # 1 + 5 + 5 + 5 tokens on one of two ranks; moving a leaf makes that 11 and 6.
    tree = tree_from_lcp(range(3), [6, 6, 6], [0, 1, 1])
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
    problem = make_problem(tree, cost=cost, ranks=2, limit=20, barrier=True)
    leveled_J = level(problem, np.zeros(3, dtype=np.int64), num_bins=2, moves=20_000, seed=0)
    assert sorted(recount(problem, leveled_J)[0].tolist()) == [6, 11]
