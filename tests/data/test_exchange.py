"""Ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from harts.data.exchange import ThreadExchange, run_in_threads


def test_arrays_arrive_where_they_are_sent():
    def work(exchange: ThreadExchange) -> tuple[list[list[int]], list[list[int]], list[int]]:
        r = exchange.rank
        gathered = exchange.all_gather(np.full(r, r), [0, 1, 2])
        parts = [np.full(r + q, 10 * r + q, dtype=np.uint8) for q in range(3)]
        swapped = exchange.all_to_all(parts, [q + r for q in range(3)])
        largest = exchange.maximum(np.array([r, -r]))
        return [a.tolist() for a in gathered], [a.tolist() for a in swapped], largest.tolist()

    for rank, (gathered, swapped, largest) in enumerate(run_in_threads(3, work)):
        assert gathered == [[], [1], [2, 2]]
        assert swapped == [[10 * q + rank] * (q + rank) for q in range(3)]
        assert largest == [2, 0]


def test_a_rank_that_fails_releases_the_others():
    def work(exchange: ThreadExchange) -> None:
        if exchange.rank == 1:
            raise KeyError("rank 1")
        exchange.maximum(np.array([0]))

    with pytest.raises(KeyError, match="rank 1"):
        run_in_threads(3, work)


def test_a_wrong_size_is_found():
    with pytest.raises(AssertionError, match="expected sizes"):
        run_in_threads(2, lambda exchange: exchange.all_gather(np.zeros(2), [2, 1]))
