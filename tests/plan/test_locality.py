"""Columns of a plan go to the ranks that hold most of them: no other numbering moves less."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from harts.data import Trajectory
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.data.redistribute import TrajectoryRecords, bits_to_move, gather_records, redistribute, return_values
from harts.plan import CostModel, Plan, locality, make_plan
from harts.plan.assignment import assign_best, assign_greedily
from harts.plan.locality import Holdings, run_where_held, running_ranks
from harts.tree import PrefixTree, tree_from_lcp
from harts.tree.lcp import sort_tokens

COST = CostModel(flops_per_token=1.0, flops_per_pair=0.01)


def step_of(seed: int, trajectories: int = 24, *, stems: int = 4) -> tuple[list[Trajectory], PrefixTree]:
    """Trajectories that begin alike to several depths. Lengths are multiples of 8, so that masks fill their bytes."""
    rng = np.random.default_rng(seed)
    begun = [rng.integers(0, 50, rng.integers(1, 40)) for _ in range(stems)]
    words = [np.concatenate([begun[i % stems], rng.integers(0, 2, rng.integers(1, 20))]) for i in range(trajectories)]
    ids = [np.repeat(word, 8) for word in words]
    offsets = np.cumsum([0, *map(len, ids)])
    order_N, lcp_N = sort_tokens(np.concatenate(ids), offsets)
    made = [Trajectory.of(i, advantages=rng.random(i.size), loss_mask=np.arange(i.size) >= 9) for i in ids]
    return made, tree_from_lcp(order_N, np.diff(offsets)[order_N], lcp_N)


def planned(tree: PrefixTree, ranks: int) -> Plan:
    return make_plan(tree, max_tokens_per_microbatch=600, cost=COST, ranks=ranks, barrier=False)


def holdings_of(tree: PrefixTree, rank_N: NDArray[np.int64]) -> Holdings:
    return Holdings(rank_N=rank_N, bits_N=np.zeros(tree.order_N.size, dtype=np.int64), bits_per_token=32)


def sent(
    trajectories: list[Trajectory], tree: PrefixTree, rank_N: NDArray[np.int64], plan: Plan
) -> tuple[int, TrajectoryRecords]:
    """Bytes that all ranks receive in a step, their trajectories and log-probs back; and what all know."""
    target_N, length_N = running_ranks(plan), np.array([len(t) for t in trajectories])

    def work(exchange: ThreadExchange) -> tuple[int, TrajectoryRecords]:
        numbers = np.flatnonzero(rank_N == exchange.rank)
        own = [trajectories[i] for i in numbers]
        records = gather_records(own, exchange, numbers, rank_N=rank_N, length_N=length_N)
        before = exchange.bytes_received + 8 * (exchange.ranks - 1)  # whether log-probs are wide
        redistribute(own, exchange, records, target_N, order_N=tree.order_N, lcp_N=tree.lcp_N)
        values_P = np.full(records.count_N[target_N == exchange.rank].sum(), 0.5)
        return_values(values_P, exchange, records, target_N)
        return exchange.bytes_received - before, records

    counts, records = zip(*run_in_threads(plan.ranks, work), strict=True)
    return sum(counts), records[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dealing", ["groups", "random", "all on one"])
def test_no_other_numbering_moves_fewer_bytes(ranks: int, dealing: str):
    """Counted on what is really sent, so the weights are right too."""
    trajectories, tree = step_of(ranks)
    number_N = np.arange(len(trajectories))
    rank_N = {
        "groups": number_N % 4 % ranks,
        "random": np.random.default_rng(5).integers(0, ranks, number_N.size),
        "all on one": np.full_like(number_N, ranks - 1),
    }[dealing]
    plan = planned(tree, ranks)
    orders = [replace(plan, slots=tuple(plan.slots[i] for i in order)) for order in permutations(range(ranks))]
    counts, records = zip(*(sent(trajectories, tree, rank_N, order) for order in orders), strict=True)
    bits_N, bits_per_token = bits_to_move(records[0])
    near = run_where_held(plan, tree, Holdings(rank_N=rank_N, bits_N=bits_N, bits_per_token=bits_per_token))
    assert near in orders
    assert sent(trajectories, tree, rank_N, near)[0] == min(counts)
    assert dealing != "groups" or ranks == 1 or min(counts) < max(counts), "some numberings are worse"


@pytest.mark.parametrize("exact_ranks", [512, 0])
def test_a_plan_that_ranks_hold_already_moves_nothing(monkeypatch: pytest.MonkeyPatch, exact_ranks: int):
    """However ranks are numbered, by the best assignment and by the one for many ranks."""
    monkeypatch.setattr(locality, "EXACT_RANKS", exact_ranks)
    _, tree = step_of(0)
    plan = planned(tree, 5)
    for seed in range(5):
        rank_N = np.random.default_rng(seed).permutation(5)[running_ranks(plan)]
        assert np.array_equal(running_ranks(run_where_held(plan, tree, holdings_of(tree, rank_N))), rank_N)


def test_many_ranks_are_numbered_without_all_pairs():
    """2000 ranks of 16 trajectories of a prompt each, which other ranks run: no array of all pairs is made."""
    number_N = np.arange(2000 * 16)
    tree = tree_from_lcp(number_N, np.full_like(number_N, 100), np.where(number_N % 16 > 0, 50, 0))
    plan = make_plan(tree, max_tokens_per_microbatch=1000, cost=COST, ranks=2000, barrier=False)
    rank_N = np.random.default_rng(0).permutation(2000)[running_ranks(plan)]
    near = run_where_held(plan, tree, holdings_of(tree, rank_N))
    assert np.array_equal(running_ranks(near), rank_N)


def test_what_every_rank_holds_does_not_count():
    """Both ranks hold the long prompt; the short rest decides."""
    tree = tree_from_lcp([0, 1, 2, 3], [100, 101, 102, 103], [0, 99, 99, 99])
    plan = make_plan(tree, max_tokens_per_microbatch=106, cost=COST, ranks=2, barrier=False)
    rank_N = 1 - running_ranks(plan)
    near = run_where_held(plan, tree, holdings_of(tree, rank_N))
    assert running_ranks(near).tolist() == rank_N.tolist()


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_assignments_reach_what_they_promise(ranks: int, seed: int):
    weight_CR = np.random.default_rng(seed).integers(0, [3, 2**50][seed % 2], (ranks, ranks))
    column = np.arange(ranks)
    best = max(weight_CR[column, list(order)].sum() for order in permutations(range(ranks)))
    rank_C = assign_best(weight_CR)
    assert sorted(rank_C) == column.tolist() and weight_CR[column, rank_C].sum() == best
    heaviest = np.argsort(-weight_CR.reshape(-1), kind="stable")[: (seed % 3 + 1) * ranks]
    greedy_C = assign_greedily(*np.divmod(heaviest, ranks), ranks)
    assert sorted(greedy_C) == column.tolist()
    assert heaviest.size < ranks**2 or weight_CR[column, greedy_C].sum() >= best / 2
