"""Packing: bins within both limits, whatever was contracted before."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan import pack
from harts.plan.problem import Problem, make_problem
from harts.plan.slots import recount
from tests.plan.families import COST, FAMILIES


def problem_of(family: str, *, ranks: int = 4, leaves: int = 120) -> Problem:
    tree = FAMILIES[family](np.random.default_rng(0), leaves)
    return make_problem(tree, cost=COST, ranks=ranks, limit=2 * int(tree.length_N.max()), barrier=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", pack.RULES)
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("times", [0.0, 0.5, 1.0, 4.0])
def test_capacities_around_the_least_are_found_from_any_guess(family, times):
    problem = problem_of(family)
    num_slots = 2 + int(pack.pack_tokens(problem, rule=pack.FIRST_FIT).max()) // problem.ranks
    tried: list[tuple[int, int]] = []
    untouched = pack.pack

    def watched(trie: pack.Trie, capacity: int, *rest: int) -> tuple[np.ndarray, np.ndarray]:
        bin_I, work_B = untouched(trie, capacity, *rest)
        tried.append((work_B.size, capacity))
        return bin_I, work_B

    guess = int(times * problem.total_work / num_slots / problem.ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "pack", watched)
        how = {"num_slots": num_slots, "guess": guess, "rule": pack.FIRST_FIT, "tolerance": 2.0**-13}
        bin_J = pack.pack_slots(problem, **how)
    if guess == 0:
        assert bin_J is None
        return
    assert bin_J is not None
    enough = [capacity for bins, capacity in tried if bins <= num_slots * problem.ranks]
    too_small = [capacity for bins, capacity in tried if bins > num_slots * problem.ranks]
    assert max(too_small) < min(enough) <= max(too_small) * (1 + 2.0**-12)
    assert len(tried) < 24
