"""Trajectories arrive as they were sent, and values of their trained tokens find the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from harts.data import Trajectory, TrajectoryBatch
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.data.redistribute import gather_records, redistribute, return_values
from harts.tree.lcp import sort_with_lcp

LENGTHS = [1, 2, 7, 8, 9, 64, 200, 3]


def make(rng: np.random.Generator, length: int, kind: str) -> Trajectory:
    mask = rng.random(length) < 0.5
    mask[0] = False
    made = Trajectory.of(
        rng.integers(0, 2**40 if kind == "wide ids" else 1000, length),
        loss_mask=mask,
        advantages=rng.standard_normal(length),
        group_id=int(rng.integers(-5, 5)),
        temperature=rng.uniform(0.5, 1),
        weight=rng.uniform(0, 2),
    )
    if kind == "log-probs":
        noise = np.where(mask, rng.standard_normal(length), np.nan)  # engines leave NaN where nothing was sampled
        made = replace(made, sampling_logprobs=-abs(noise), ref_logprobs=-abs(2 * noise))
    if kind == "some share keys" and rng.random() < 0.5:
        made = replace(made, share_key=rng.integers(-3, 3, length))
    if kind == "routes":
        made = replace(made, routes=(rng.integers(0, 9, (length, 3, 1)) + np.arange(2)).astype(np.int32))
    return made


def begun_like(trajectory: Trajectory, other: Trajectory, depth: int) -> Trajectory:
    """The trajectory with the first tokens of another; masks and streams stay its own."""
    ids = np.concatenate([other.token_ids[:depth], trajectory.token_ids[depth:]])
    changed = replace(trajectory, token_ids=ids)
    if other.share_key is not None:
        key = np.zeros(len(trajectory), np.int64) if trajectory.share_key is None else trajectory.share_key
        changed = replace(changed, share_key=np.concatenate([other.share_key[:depth], key[depth:]]))
    if other.routes is not None and trajectory.routes is not None:
        changed = replace(changed, routes=np.concatenate([other.routes[:depth], trajectory.routes[depth:]]))
    return changed


def assert_same(one: Trajectory, other: Trajectory) -> None:
    """Equal in all that a step reads."""
    mask = one.loss_mask
    np.testing.assert_array_equal(one.token_ids, other.token_ids)
    np.testing.assert_array_equal(mask, other.loss_mask)
    for name in ("advantages", "sampling_logprobs", "ref_logprobs"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a[mask], b[mask])
    zero = np.zeros(len(one), dtype=np.int64)
    key, other_key = (zero if t.share_key is None else t.share_key for t in (one, other))
    np.testing.assert_array_equal(key, other_key)
    assert (one.routes is None) == (other.routes is None)
    if one.routes is not None and other.routes is not None:
        np.testing.assert_array_equal(one.routes, other.routes)
    assert (one.group_id, one.temperature, one.weight) == (other.group_id, other.temperature, other.weight)
    assert other.token_ids.dtype == np.int64 and other.loss_mask.dtype == bool


@pytest.mark.parametrize("kind", ["plain", "wide ids", "log-probs", "some share keys", "routes"])
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_every_trajectory_arrives_where_it_runs(kind, ranks):
    rng = np.random.default_rng(ranks)
    trajectories = [make(rng, length, kind) for length in LENGTHS]
    for later, earlier, depth in ((6, 5, 40), (4, 6, 5), (7, 6, 2), (3, 4, 8), (2, 3, 7)):
        trajectories[later] = begun_like(trajectories[later], trajectories[earlier], depth)
    order_N, lcp_N = sort_with_lcp(TrajectoryBatch.of(trajectories))
    assert lcp_N.max() >= 7, "some begin alike"
    rank_N, target_N = rng.integers(0, min(ranks, 4), (2, len(LENGTHS)))  # of five the last holds and runs nothing
    length_N = np.array(LENGTHS)

    def work(exchange: ThreadExchange) -> tuple[Sequence[Trajectory], np.ndarray, np.ndarray]:
        numbers = rng_of_rank[exchange.rank].permutation(np.flatnonzero(rank_N == exchange.rank))
        own = [trajectories[i] for i in numbers]
        records = gather_records(own, exchange, numbers, rank_N=rank_N, length_N=length_N)
        assert records.count_N.tolist() == [t.loss_mask.sum() for t in trajectories]
        assert records.weight_N.tolist() == [t.weight for t in trajectories]
        here = redistribute(own, exchange, records, target_N, order_N=order_N, lcp_N=lcp_N)
        values_P = np.concatenate([np.zeros(0), *(t.advantages[t.loss_mask] for t in here)])
        back = return_values(values_P, exchange, records, target_N)
        return here, back, np.concatenate([np.zeros(0), *(t.advantages[t.loss_mask] for t in own)])

    rng_of_rank = [np.random.default_rng(rank) for rank in range(ranks)]
    for rank, (here, back, expected) in enumerate(run_in_threads(ranks, work)):
        ran = np.flatnonzero(target_N == rank)
        assert len(here) == ran.size
        for number, trajectory in zip(ran, here, strict=True):
            assert_same(trajectories[number], trajectory)
        np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("advantage", [0.0, 0.5, 0.1])
def test_what_stays_costs_nothing_and_what_leaves_travels_once(advantage):
    mask = np.arange(100) >= 90
    trajectories = [Trajectory.of(np.arange(100) + 100 * i, loss_mask=mask, advantages=advantage) for i in range(3)]

    def work(exchange: ThreadExchange) -> int:
        numbers = np.array([[0, 1], [2]][exchange.rank])
        rank_N, target_N = np.array([0, 0, 1]), np.array([0, 1, 1])
        own = [trajectories[i] for i in numbers]
        records = gather_records(own, exchange, numbers, rank_N=rank_N, length_N=np.full(3, 100))
        before = exchange.bytes_received
        redistribute(own, exchange, records, target_N, order_N=np.arange(3), lcp_N=np.zeros(3, np.int64))
        return exchange.bytes_received - before

    # One advantage, the same for all tokens; 0.1 needs 64 bits.
    assert run_in_threads(2, work) == [0, 4 * 100 + 13 + {0.0: 0, 0.5: 4, 0.1: 8}[advantage]]


@pytest.mark.parametrize("name", ["sampling_logprobs", "ref_logprobs", "routes"])
def test_streams_that_some_ranks_lack_are_named_on_every_rank(name):
    full = Trajectory.of([1, 2], **{name: np.zeros((2, 1, 1)) if name == "routes" else [0.0, 0.0]})
    seen = []

    def work(exchange: ThreadExchange) -> None:
        own = [[full], [], [Trajectory.of([1, 2])]][exchange.rank]
        numbers = np.array([[0], [], [1]][exchange.rank], dtype=np.int64)
        with pytest.raises(ValueError, match=f"rank 0 and those of rank 2 differ in {name}"):
            gather_records(own, exchange, numbers, rank_N=np.array([0, 2]), length_N=np.full(2, 2))
        seen.append(exchange.rank)

    run_in_threads(3, work)
    assert len(seen) == 3
