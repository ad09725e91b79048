"""The bound from prices: no plan beats it, it sees what cannot be divided, and what it computes is what it says."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan import CostModel
from harts.plan.bounds import lower_bound
from harts.plan.prices import UNREACHED, _fill_least, _next_segments, priced_bound
from harts.plan.problem import Problem, make_problem
from harts.plan.search import search
from harts.plan.slots import recount
from harts.tree import PrefixTree, tree_from_lcp
from tests.plan.exact import exhaustive_optimum
from tests.plan.families import COST, FAMILIES, small_tree

LINEAR = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
DEEP = CostModel(flops_per_token=3.0, flops_per_pair=1.0, flops_per_microbatch=7.0)
DEAR = CostModel(flops_per_token=4.0, flops_per_pair=0.0, flops_per_microbatch=3.0)
FREE = CostModel(flops_per_token=0.0, flops_per_pair=0.0, flops_per_microbatch=1.0)
few = settings(max_examples=60, deadline=None)


def problem_of(tree: PrefixTree, *, ranks: int, limit: int, cost: CostModel = LINEAR) -> Problem:
    return make_problem(tree, cost=cost, ranks=ranks, limit=limit, barrier=True)


def best_bound(problem: Problem) -> int:
    return priced_bound(problem, known=0, reached=10 * (problem.total_work + problem.overhead))


def test_what_cannot_be_divided_takes_a_slot_of_its_own_or_twice_the_height():
    # Three jobs of 4 on two ranks: half of all work is 6, but some rank has two of them.
    problem = problem_of(tree_from_lcp(range(3), [4, 4, 4], [0, 0, 0]), ranks=2, limit=100)
    assert lower_bound(problem).makespan == 6
    assert best_bound(problem) == 8 == exhaustive_optimum(problem)


def test_slots_count_their_overhead():
    # Two microbatches of a job each, for the limit: slots on one rank, in one slot on two.
    tree = tree_from_lcp(range(2), [4, 4], [0, 0])
    assert best_bound(problem_of(tree, ranks=1, limit=7, cost=DEAR)) == 2 * (16 + 3)
    assert best_bound(problem_of(tree, ranks=2, limit=7, cost=DEAR)) == 16 + 3


def test_prefixes_of_parts_are_seen():
    # 10 tokens shared by four jobs of 10 more on two ranks. Counting segments finds (2 x 10 + 4 x 10) / 2 as well.
    problem = problem_of(tree_from_lcp(range(4), [20] * 4, [0, 10, 10, 10]), ranks=2, limit=100)
    assert best_bound(problem) == 30 == exhaustive_optimum(problem)


@few
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3), st.floats(1, 3), st.sampled_from([LINEAR, DEEP]))
def test_no_plan_is_shorter(seed, num, ranks, spare, cost):
    tree = small_tree(np.random.default_rng(seed), num)
    problem = problem_of(tree, ranks=ranks, limit=int(tree.length_N.max() * spare), cost=cost)
    assert best_bound(problem) <= exhaustive_optimum(problem)


@few
@given(st.integers(0, 10**6), st.integers(1, 8), st.data())
def test_least_weights_are_those_of_the_best_sets_of_jobs(seed, num, data):
    problem = problem_of(small_tree(np.random.default_rng(seed), num), ranks=1, limit=10**6, cost=DEEP)
    price_J = np.array(data.draw(st.lists(st.integers(0, 9), min_size=problem.num_jobs, max_size=problem.num_jobs)))
    need = max(int(price_J.sum()), 1)
    price_S = np.zeros(problem.parent_S.size, dtype=np.int64)
    price_S[problem.tail_J] = price_J
    least_SV = np.empty((price_S.size + 1, need + 3), dtype=np.int32)
    _fill_least(least_SV, problem.own_S.astype(np.int32), price_S, _next_segments(problem.parent_S), need)
    expected_V = np.full(need + 1, UNREACHED)
    expected_V[0] = 0
    for count in range(1, problem.num_jobs + 1):
        for jobs in combinations(range(problem.num_jobs), count):
            bin_J = np.ones(problem.num_jobs, dtype=np.int64)
            bin_J[list(jobs)] = 0
            work, value = recount(problem, bin_J)[0][0], price_J[list(jobs)].sum()
            expected_V[: value + 1] = np.minimum(expected_V[: value + 1], [0, *[work] * value])
    assert least_SV[0, : need + 1].tolist() == expected_V.tolist()


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_segments_below_another_follow_it(seed, num):
    problem = problem_of(small_tree(np.random.default_rng(seed), num), ranks=1, limit=10**6)
    below_S = np.ones(problem.parent_S.size, dtype=np.int64)
    for segment in range(below_S.size - 1, -1, -1):
        if problem.parent_S[segment] >= 0:
            below_S[problem.parent_S[segment]] += below_S[segment]
    assert (_next_segments(problem.parent_S) == np.arange(below_S.size) + below_S).all()


def test_whole_trees_that_fill_few_microbatches_raise_the_bound():
    tree = FAMILIES["agent"](np.random.default_rng(0), 120)
    problem = problem_of(tree, ranks=4, limit=2 * int(tree.length_N.max()), cost=COST)
    found = search(problem, seed=0)
    assert lower_bound(problem).makespan * 1.02 < found.bound.makespan <= found.schedule.makespan


@pytest.mark.parametrize("num", [3, 300])
def test_too_many_jobs_or_no_work_leave_what_is_known(num):
    tree = tree_from_lcp(range(num), [5] * num, [0] * num)
    problem = problem_of(tree, ranks=2, limit=5, cost=LINEAR if num == 300 else FREE)
    assert priced_bound(problem, known=1, reached=10**6) == 1
