"""The least capacity: found from any guess, by every rule."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan import capacity
from harts.plan.pack import FIRST_FIT, Trie
from harts.plan.slots import recount
from tests.plan.families import FAMILIES, problem_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("times", [0.0, 0.5, 1.0, 4.0])
def test_capacities_around_the_least_are_found_from_any_guess(family, times):
    problem = problem_of(family)
    num_slots = 2 + int(capacity.pack_tokens(problem, rule=FIRST_FIT).max()) // problem.ranks
    tried: list[tuple[int, int]] = []
    untouched = capacity.pack

    def watched(trie: Trie, most: int, *rest: int) -> tuple[np.ndarray, np.ndarray]:
        bin_I, work_B = untouched(trie, most, *rest)
        tried.append((work_B.size, most))
        return bin_I, work_B

    guess = int(times * problem.total_work / num_slots / problem.ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "pack", watched)
        how = {"num_slots": num_slots, "guess": guess, "rule": FIRST_FIT, "tolerance": 2.0**-13}
        bin_J = capacity.pack_slots(problem, **how)
    if guess == 0:
        assert bin_J is None
        return
    assert bin_J is not None
    enough = [most for bins, most in tried if bins <= num_slots * problem.ranks]
    too_small = [most for bins, most in tried if bins > num_slots * problem.ranks]
    assert max(too_small) < min(enough) <= max(too_small) * (1 + 2.0**-12)
    assert len(tried) < 24


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", capacity.RULES)
def test_bins_fill_no_more_than_the_slots(family, rule):
    problem = problem_of(family, leaves=300)
    num_slots = 1 + int(capacity.pack_tokens(problem, rule=rule).max()) // problem.ranks
    guess = problem.total_work // num_slots // problem.ranks
    bin_J = capacity.pack_slots(problem, num_slots=num_slots, guess=guess, rule=rule, tolerance=2.0**-9)
    assert bin_J is not None and bin_J.max() < num_slots * problem.ranks
    assert recount(problem, bin_J)[1].max() <= problem.limit


def test_filled_slots_end_the_search_early():
    problem = problem_of("search_tree", ranks=64, leaves=6000)
    num_slots = 1 + int(capacity.pack_tokens(problem, rule=capacity.BEAM).max()) // problem.ranks
    tried: list[int] = []
    untouched = capacity.pack_alternatives

    def watched(*args: object) -> tuple[np.ndarray, np.ndarray]:
        bin_I, work_B = untouched(*args)
        tried.append(work_B.size)
        return bin_I, work_B

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity, "pack_alternatives", watched)
        guess = problem.total_work // num_slots // problem.ranks
        how = {"num_slots": num_slots, "guess": guess, "rule": capacity.BEAM, "tolerance": 1.0}
        assert capacity.pack_slots(problem, **how) is not None
    assert 3 * num_slots * problem.ranks / 4 < tried[-1] <= num_slots * problem.ranks < tried[-2]
