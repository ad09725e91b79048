"""Packing with alternatives: bins within both limits, fuller and with less work than first fit makes them."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan import CostModel, capacity
from harts.plan.beam import pack_alternatives
from harts.plan.pack import FIRST_FIT, UNLIMITED, trie_of
from harts.plan.problem import Problem, make_problem
from harts.plan.slots import recount
from harts.tree import tree_from_lcp
from tests.plan.families import FAMILIES, problem_of


def of_leaves(leaves: list[tuple[int, int]], *, limit: int) -> Problem:
    """Jobs of a length and the tokens that each shares with the one before; a token is a unit of work."""
    length_J, lcp_J = zip(*leaves, strict=True)
    tree = tree_from_lcp(np.arange(len(leaves)), list(length_J), list(lcp_J))
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
    return make_problem(tree, cost=cost, ranks=1, limit=limit, barrier=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_bins_keep_both_limits_and_their_work_is_that_of_their_tries(family, fraction):
    problem = problem_of(family)
    longest = int(problem.path_D[problem.length_J].max())
    for most in (longest // 2, longest, 2 * longest):
        trie = trie_of(problem, most, fraction=fraction)
        bin_I, work_B = pack_alternatives(trie, most, problem.limit, most // 8)
        work, tokens = recount(problem, bin_I[trie.item_J])
        assert (work <= work_B).all() and work.size == work_B.size
        assert tokens.max() <= problem.limit
        single_B = np.bincount(bin_I[trie.item_J]) == 1
        assert (work_B[~single_B] <= most).all()


def test_groups_that_fit_stay_apart_where_that_fills_bins_further_up():
    # Below a root of 100 tokens: leaves of 400 and 200 below a fork of 100, leaves of 600 and 700. Merged below the
    # fork the first two fit nowhere else within 1200; apart, 100 + 500 + 600 and 100 + 300 + 700 fill two bins.
    problem = of_leaves([(600, 0), (400, 200), (700, 100), (800, 100)], limit=1200)
    assert capacity.pack_tokens(problem, rule=FIRST_FIT).max() + 1 == 3
    bin_J = capacity.pack_tokens(problem, rule=capacity.BEAM)
    assert recount(problem, bin_J)[1].tolist() == [1200, 1100]
    assert bin_J.tolist() == [0, 1, 0, 1]


def test_full_bins_of_a_large_tree_take_small_trees_in():
    # Two leaves of 100 tokens fill bins of 101 but for one token each, which is less than the beam asks about.
    problem = of_leaves([(100, 0), (100, 1), (1, 0), (1, 0)], limit=101)
    bin_J = capacity.pack_tokens(problem, rule=capacity.BEAM)
    assert bin_J.max() == 1


@pytest.mark.parametrize("above", [0, 5])
def test_many_children_are_packed_by_first_fit(above):
    # 40 leaves of 3 below `above` tokens, 10 to a bin of 30.
    problem = of_leaves([(above + 3, above if i else 0) for i in range(40)], limit=above + 30)
    bin_J = capacity.pack_tokens(problem, rule=capacity.BEAM)
    assert np.bincount(bin_J).tolist() == [10] * 4


@pytest.mark.parametrize(
    ("family", "leaves", "bins", "work"), [("search_tree", 3000, 0.95, 0.997), ("pareto", 6000, 1.0, 0.999)]
)
def test_large_trees_take_fewer_bins_and_less_work_than_by_first_fit(family, leaves, bins, work):
    for seed in range(3):
        problem = problem_of(family, leaves=leaves, seed=seed)
        fit, beam = (recount(problem, capacity.pack_tokens(problem, rule=r))[0] for r in (FIRST_FIT, capacity.BEAM))
        assert beam.size <= bins * fit.size
        assert beam.sum() < work * fit.sum()


def test_a_price_for_bins_makes_them_fewer():
    problem = problem_of("search_tree", leaves=3000)
    trie = trie_of(problem, UNLIMITED, fraction=0.1)
    full = capacity.full_bin(problem)
    bins = [pack_alternatives(trie, UNLIMITED, problem.limit, price)[1].size for price in (0, full)]
    assert bins[1] < bins[0]


def test_forks_below_which_all_bins_are_full_leave_the_others_to_be_merged():
    # Two forks with a pair of full leaves each; beside them two leaves of 10 + 45 that share a bin.
    problem = of_leaves([(100, 0), (100, 30), (100, 20), (100, 30), (55, 10), (55, 10)], limit=100)
    assert np.bincount(capacity.pack_tokens(problem, rule=capacity.BEAM)).tolist() == [1, 1, 1, 1, 2]
