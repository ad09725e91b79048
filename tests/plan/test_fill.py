"""Filling slots with the parts that a packing has of different trees."""

from __future__ import annotations

import numpy as np

from harts.plan import make_plan
from harts.plan.capacity import pack_tokens
from harts.plan.cost import CostModel
from harts.plan.fill import fill_evenly
from harts.plan.pack import FIRST_FIT
from harts.plan.portfolio import close_gaps
from harts.plan.problem import Problem, make_problem
from harts.plan.slots import recount, schedule
from harts.tree import tree_from_lcp
from tests.plan.families import COST, FAMILIES


def problem_of(lengths: list[int], lcp: list[int], *, ranks: int, limit: int) -> Problem:
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
    tree = tree_from_lcp(np.arange(len(lengths)), lengths, lcp)
    return make_problem(tree, cost=cost, ranks=ranks, limit=limit, barrier=True)


def test_trees_of_one_bin_part_and_jobs_of_one_tree_do_not():
    # One bin of two trees, 4 + 1 + 1 and 5 tokens, and one of a third, 2 tokens; 7 and 6 is the best of one slot.
    problem = problem_of([5, 5, 5, 2], [0, 4, 0, 0], ranks=2, limit=11)
    number_J = fill_evenly(problem, np.array([0, 0, 0, 1]))
    assert number_J is not None
    assert number_J[0] == number_J[1] and number_J[2] == number_J[3] != number_J[0]
    assert sorted(recount(problem, number_J)[0].tolist()) == [6, 7]


def test_the_slot_of_a_large_part_is_filled_up():
    # 9 alone, 6 + 3, and 5 + 4.
    problem = problem_of([9, 6, 5, 4, 3], [0] * 5, ranks=3, limit=9)
    number_J = fill_evenly(problem, np.arange(5))
    assert number_J is not None
    assert recount(problem, number_J)[0].tolist() == [9, 9, 9]


def test_parts_that_waste_too_much_of_the_limit_are_no_plan():
    # Two parts of 4 tokens do not fit into 6, so there is a slot for each; 14 are tried for 16.
    assert fill_evenly(problem_of([4] * 16, [0] * 16, ranks=1, limit=6), np.arange(16)) is None


def test_slots_of_heavy_tailed_trees_are_more_even_at_no_more_work():
    tree = FAMILIES["pareto"](np.random.default_rng(0), 6000)
    limit = 2 * int(tree.length_N.max())
    problem = make_problem(tree, cost=COST, ranks=16, limit=limit, barrier=True)
    bin_J = pack_tokens(problem, rule=FIRST_FIT)
    filled_J = fill_evenly(problem, bin_J)
    assert filled_J is not None
    work_B, tokens_B = recount(problem, filled_J)
    assert tokens_B.max() <= limit and work_B.sum() <= recount(problem, bin_J)[0].sum()
    filled, packed = schedule(problem, close_gaps(filled_J)), schedule(problem, bin_J)
    assert filled.makespan < packed.makespan
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=16)
    assert plan.makespan <= filled.makespan * problem.unit * (1 + 1e-9)
