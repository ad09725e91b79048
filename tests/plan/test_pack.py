"""First and worst fit: bins within both limits, whatever was contracted before."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan import pack
from harts.plan.slots import recount
from tests.plan.families import FAMILIES, problem_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", pack.FIT_RULES)
def test_bins_keep_both_limits_and_their_work_is_that_of_their_tries(family, rule):
    problem = problem_of(family)
    longest = int(problem.path_D[problem.length_J].max())
    for capacity in (longest // 2, longest, 2 * longest):
        trie = pack.trie_of(problem, capacity)
        bin_I, work_B = pack.pack(trie, capacity, problem.limit, rule, 0)
        work, tokens = recount(problem, bin_I[trie.item_J])
        assert work.tolist() == work_B.tolist()
        assert tokens.max() <= problem.limit
        single_B = np.bincount(bin_I[trie.item_J]) == 1
        assert (work[~single_B] <= capacity).all()


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"grpo"}))  # none of whose groups fits
def test_contracting_subtrees_that_fit_changes_no_packing(family):
    problem = problem_of(family)
    capacity = 2 * int(problem.path_D[problem.length_J].max())
    contracted, whole = pack.trie_of(problem, capacity), pack.trie_of(problem, 0)
    assert contracted.above_I.size < whole.above_I.size == problem.num_jobs
    works = [pack.pack(trie, capacity, problem.limit, pack.FIRST_FIT, 0)[1] for trie in (contracted, whole)]
    assert sorted(works[0].tolist()) == sorted(works[1].tolist())
