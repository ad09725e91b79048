"""Every distinct token travels to a rank once, and only if the rank has none like it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.data.arrivals import plan_arrivals
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.data.redistribute import gather_records, redistribute
from harts.data.trajectory import example_trajectories
from harts.tree.lcp import sort_with_lcp

Word = tuple[int, ...]
WORDS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=12)


def prefixes(words: list[Word]) -> set[Word]:
    return {word[:end] for word in words for end in range(1, len(word) + 1)}


@given(WORDS, st.integers(0, 2**32 - 1))
def test_what_travels_is_what_the_rank_lacks(words: list[Word], seed: int):
    rank_N, target_N = np.random.default_rng(seed).integers(0, 3, (2, len(words)))
    order_N, lcp_N = sort_with_lcp(TrajectoryBatch.of([Trajectory.of(word) for word in words]))
    for receiver in range(3):
        found = plan_arrivals(receiver, rank_N=rank_N, target_N=target_N, order_N=order_N, lcp_N=lcp_N)
        come = (rank_N != receiver) & (target_N == receiver)
        assert found.numbers.tolist() == [i for i in order_N if come[i]]
        held = [word for word, rank in zip(words, rank_N, strict=True) if rank == receiver]
        had = {i: words[i] for i in range(len(words)) if rank_N[i] == receiver}
        for number, source, shared in zip(found.numbers, found.source, found.shared, strict=True):
            assert (shared == 0) == (source == -1)
            assert not shared or had[source][:shared] == words[number][:shared], "it is there by then"
            had[number] = words[number]
        sent = sum(len(words[i]) for i in found.numbers) - found.shared.sum()
        assert sent == len(prefixes([words[i] for i in found.numbers]) - prefixes(held))


@pytest.mark.parametrize(
    ("rank_N", "distinct", "tokens"),
    [
        ([0, 0, 0, 0], 8, 16),  # all from one rank
        ([0, 2, 2, 0], 8, 16),  # `abc` begins what another rank sends
        ([1, 0, 0, 2], 3, 11),  # rank 1 holds `abcde`: `xy` and `z` are left
        ([0, 0, 0, 1], 5, 13),  # rank 1 holds `abc`
    ],
)
def test_bytes_of_the_worked_example(rank_N, distinct, tokens):
    """`abcde`, `abxy`, `abcz`, `abc` all go to rank 1, with masks and the advantages of `e`, `y`, `z` and `c`, which
    float32 holds."""
    trajectories = [replace(t, loss_mask=np.arange(len(t)) == len(t) - 1) for t in example_trajectories(advantages=0.5)]
    order_N, lcp_N = sort_with_lcp(TrajectoryBatch.of(trajectories))
    rank_N, length_N = np.array(rank_N), np.array([len(t) for t in trajectories])

    def work(exchange: ThreadExchange) -> int:
        numbers = np.flatnonzero(rank_N == exchange.rank)
        own = [trajectories[i] for i in numbers]
        records = gather_records(own, exchange, numbers, rank_N=rank_N, length_N=length_N)
        before = exchange.bytes_received
        target_N = np.ones(4, dtype=np.int64)
        here = redistribute(own, exchange, records, target_N, order_N=order_N, lcp_N=lcp_N)
        assert [t.token_ids.tolist() for t in here] == (
            [t.token_ids.tolist() for t in trajectories] if exchange.rank == 1 else []
        )
        return exchange.bytes_received - before

    come = rank_N != 1
    assert length_N[come].sum() == tokens
    masks = sum(-(-int(length_N[rank_N == sender].sum()) // 8) for sender in (0, 2))
    assert run_in_threads(3, work) == [0, 4 * distinct + masks + 4 * int(come.sum()), 0]
