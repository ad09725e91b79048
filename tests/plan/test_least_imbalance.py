"""The bound on the imbalance of the longest trajectory's slot, against all plans of a few trajectories."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import least_imbalance
from harts.plan import CostModel
from harts.plan.problem import make_problem
from harts.plan.slots import recount
from tests.plan.exact import partitions
from tests.plan.families import small_tree

COST = CostModel(flops_per_token=3.0, flops_per_pair=1.0)


def least_of_all_plans(seed: int, ranks: int, spare: int) -> tuple[float, float]:
    """Bound and least imbalance over partitions and over the microbatches that share the longest one's slot."""
    tree = small_tree(np.random.default_rng(seed), 5)
    limit = int(tree.length_N.max()) + spare
    problem = make_problem(tree, cost=COST, ranks=ranks, limit=limit, barrier=True)
    longest, best = int(problem.length_J.argmax()), np.inf
    for bins in partitions(problem.num_jobs):
        bin_J = np.array(bins)
        work_B, tokens_B = recount(problem, bin_J)
        if tokens_B.max() > limit:
            continue
        own = work_B[bin_J[longest]]
        others = [*np.delete(work_B, bin_J[longest]).tolist(), *[0] * (ranks - 1)]
        for chosen in combinations(others, ranks - 1):
            best = min(best, max(own, *chosen) * ranks / (own + sum(chosen)) - 1)
    return least_imbalance(problem.length_J, COST, ranks=ranks, limit=limit), float(best)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 3), st.integers(0, 60))
def test_no_plan_is_more_even(seed, ranks, spare):
    bound, best = least_of_all_plans(seed, ranks, spare)
    assert bound <= best + 1e-9


def test_it_takes_the_other_ranks_as_full():
    # 10 tokens alone; the other rank has a trajectory of 4 and six tokens more, each as deep as its last.
    bound = least_imbalance(np.array([10, 4, 4]), CostModel(flops_per_token=0.0, flops_per_pair=1.0), ranks=2, limit=10)
    assert bound == pytest.approx(55 / ((55 + 10 + 6 * 4) / 2) - 1)
