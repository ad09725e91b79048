"""Trees that two ranks run for each other change places, and nothing else about the step changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harts.plan import CostModel, Plan, make_plan, swaps
from harts.plan.locality import Holdings, run_where_held, running_ranks
from harts.plan.plan import fill_slots
from harts.plan.slots import Places
from harts.plan.swaps import swap_home
from harts.tree import PrefixTree, tree_from_lcp
from tests.plan.test_locality import holdings_of, sent, step_of

COST = CostModel(flops_per_token=1.0, flops_per_pair=0.01)


def groups(length_G: list[int], *, stem: int = 0) -> PrefixTree:
    """Four trajectories of a prompt, half of each; all prompts begin with a common stem."""
    length_N = np.repeat(length_G, 4) + stem
    lcp_N = np.where(np.arange(length_N.size) % 4 > 0, (length_N - stem) // 2 + stem, stem)
    return tree_from_lcp(np.arange(length_N.size), length_N, np.where(np.arange(length_N.size) > 0, lcp_N, 0))


def moved(plan: Plan, holdings: Holdings) -> int:
    return int((running_ranks(plan) != holdings.rank_N).sum())


def at_home(plan: Plan, tree: PrefixTree, rank_N: NDArray[np.int64], stem: int) -> int:
    """Tokens that ranks run of whole groups that they hold."""
    pieces = [
        [number for number in microbatch.trajectories if number // 4 == group]
        for rank, row in enumerate(plan.slots)
        for microbatch in row
        for group in {number // 4 for number in microbatch.trajectories}
        if rank_N[4 * group] == rank
    ]
    return sum(tree.restrict(piece).num_tokens - stem for piece in pieces)


@pytest.mark.parametrize("stem", [0, 50])
def test_equal_groups_all_go_home(stem: int):
    """Whole groups, dealt in turn; a plan puts them where it likes."""
    tree = groups([100] * 24, stem=stem)
    plan = make_plan(tree, max_tokens_per_microbatch=1100, cost=COST, ranks=4, barrier=False)
    assert plan.num_slots > 1
    holdings = holdings_of(tree, np.random.default_rng(3).permutation(24)[np.arange(96) // 4] % 4)
    numbered = run_where_held(plan, tree, holdings)
    home = swap_home(numbered, tree, holdings, cost=COST)
    assert moved(numbered, holdings) > 30
    assert moved(home, holdings) == 0
    assert home.makespan == plan.makespan


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=30),
    st.integers(1, 5),
    st.sampled_from([0, 1, 13]),
    st.integers(0, 2**32 - 1),
)
def test_nothing_else_changes(length_G: list[int], ranks: int, stem: int, seed: int):
    """Each trajectory runs once, in no more time, and every microbatch is what it says and fits."""
    tree = groups([2 * length for length in length_G], stem=stem)
    limit = 6 * max(length_G) + stem  # the largest tree has 5
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, ranks=ranks, barrier=False)
    rng = np.random.default_rng(seed)
    number_N = np.arange(tree.order_N.size)
    rank_N = rng.integers(0, ranks, number_N.size)[number_N // 4]
    home = swap_home(plan, tree, holdings_of(tree, rank_N), cost=COST)
    saved = at_home(home, tree, rank_N, stem) - at_home(plan, tree, rank_N, stem)
    assert saved == 0 if home == plan else saved > 0
    assert home.makespan <= plan.makespan
    assert (home.ranks, home.num_slots) == (plan.ranks, plan.num_slots)
    microbatches = [m for rank in home.slots for m in rank if m.trajectories]
    assert sorted(number for m in microbatches for number in m.trajectories) == number_N.tolist()
    for microbatch in microbatches:
        part = tree.restrict(microbatch.trajectories)
        assert tuple(part.order_N.tolist()) == microbatch.trajectories
        assert part.num_tokens == microbatch.num_tokens <= limit
        assert part.num_trajectory_tokens == microbatch.num_trajectory_tokens
        work = COST.path_work(part.length_N).sum() - COST.path_work(part.lcp_N).sum()
        assert microbatch.predicted_work == pytest.approx(work)


@pytest.mark.parametrize("seed", range(4))
def test_fewer_bytes_are_sent(seed: int):
    trajectories, tree = step_of(seed, 60, stems=20)
    plan = make_plan(tree, max_tokens_per_microbatch=600, cost=COST, ranks=3, barrier=False)
    rank_N = np.arange(60) % 20 % 3
    home = swap_home(plan, tree, holdings_of(tree, rank_N), cost=COST)
    assert home != plan
    assert sent(trajectories, tree, rank_N, home)[0] < sent(trajectories, tree, rank_N, plan)[0]


def test_plans_whose_swaps_are_not_free_stay(monkeypatch: pytest.MonkeyPatch):
    """With barriers slots would change their height, flat microbatches are padded, and a large plan costs too much."""
    tree = groups([100] * 8)
    options = {"max_tokens_per_microbatch": 1600, "cost": COST, "ranks": 2}
    plan = make_plan(tree, barrier=False, **options)
    holdings = holdings_of(tree, 1 - running_ranks(plan))
    assert swap_home(plan, tree, holdings, cost=COST) != plan
    for other in (make_plan(tree, **options), make_plan(tree, barrier=False, sharing=False, **options)):
        assert swap_home(other, tree, holdings, cost=COST) is other
    monkeypatch.setattr(swaps, "MOST_WEIGHTS", 15)
    assert swap_home(plan, tree, holdings, cost=COST) is plan


def test_a_longer_tree_does_not_displace_a_shorter_one():
    """Each rank holds the other's, but the one that runs two more has no time for the longest."""
    tree = groups([100, 60, 30, 10])
    plan = plan_of(tree, [[[0]], [[1, 2, 3]]], 1000)
    target_N = running_ranks(plan)
    rank_N = np.append(1 - target_N[:8], target_N[8:])
    assert running_ranks(swap_home(plan, tree, holdings_of(tree, rank_N), cost=COST)).tolist() == target_N.tolist()


def plan_of(tree: PrefixTree, groups_RS: list[list[list[int]]], limit: int) -> Plan:
    """A plan that runs whole groups in these slots."""
    slots = [some for row in groups_RS for some in row]
    slot_of = {group: slot for slot, some in enumerate(slots) for group in some}
    bin_N = np.array([slot_of[number // 4] for number in tree.order_N.tolist()])
    rank_B, slot_B = np.divmod(np.arange(bin_N.max() + 1), len(groups_RS[0]))
    return Plan(
        slots=fill_slots(tree, COST, bin_N, tree.lcp_N, Places(rank_B=rank_B, slot_B=slot_B)),
        max_tokens_per_microbatch=limit,
        sharing=True,
        barrier=False,
        overhead=0.0,
        lower_bound=0.0,
        peers={},
    )


@pytest.mark.parametrize(("limit", "swapped"), [(280, False), (300, True)])
def test_a_microbatch_that_is_full_takes_no_larger_tree(limit: int, swapped: bool):
    """Groups 1 and 5 would go home, with time to spare, into the microbatch of group 0."""
    tree = groups([60, 40, 60, 80, 50, 60])
    plan = plan_of(tree, [[[0, 1], [2]], [[3], [4, 5]]], limit)
    rank_N = np.repeat([0, 1, 0, 1, 1, 0], 4)
    home = swap_home(plan, tree, holdings_of(tree, rank_N), cost=COST)
    assert (running_ranks(home) == rank_N).all() == swapped
    assert (home == plan) == (not swapped)


def test_no_larger_tree_leaves_home_for_a_smaller_one():
    tree = groups([40, 60, 50])
    plan = plan_of(tree, [[[0]], [[1, 2]]], 1000)
    assert swap_home(plan, tree, holdings_of(tree, np.ones(12, dtype=np.int64)), cost=COST) == plan
