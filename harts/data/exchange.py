"""What data-parallel ranks tell each other: flat arrays of numbers whose sizes all of them know.

No Python objects travel, and no sizes: who needs to know how much comes computes it from what was exchanged before.
`harts/train/distributed.py` does this over a network; here are the interface and ranks that are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Result = TypeVar("Result")


class Exchange(Protocol):
    """One rank's end. All ranks make the same calls in the same order, with arrays of one dtype in each."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def ranks(self) -> int:
        """How many take part."""
        ...

    def all_gather(self, values: NDArray, sizes: Sequence[int]) -> list[NDArray]:
        """Give every rank an array and get that of every rank.

        Args:
            values: [sizes[rank]], of any numeric dtype.
            sizes: Entries that each rank gives; the same on all ranks.

        Returns:
            The arrays by rank, this one's too.
        """
        ...

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        """Give every rank an array of its own.

        Args:
            parts: By receiver, one-dimensional; may be empty.
            sizes: Entries that come from each rank.

        Returns:
            The arrays by sender.
        """
        ...

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The largest value over ranks, entry by entry. As many bytes for any number of ranks."""
        ...


def raise_together(error: ValueError | None, failed_R: NDArray[np.integer]) -> None:
    """Raise on every rank if any has an error, so that none waits for one that has left.

    Args:
        error: This rank's, None if it has none.
        failed_R: [ranks]. Not zero where a rank has one, as all ranks were told.

    Raises:
        ValueError: This rank's own error, or else one that names the ranks that have one.
    """
    if error is not None:
        raise error
    failed = np.flatnonzero(failed_R).tolist()
    if failed:
        raise ValueError(f"Ranks {failed} found their trajectories wrong. What those ranks raise says why.")


class _Table:
    """Where threads lay what they exchange."""

    def __init__(self, ranks: int) -> None:
        self.laid: list[Sequence[NDArray]] = [()] * ranks
        self.barrier = threading.Barrier(ranks)


class ThreadExchange:
    """The end of a rank that is a thread; counts what comes from others."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.bytes_received = 0
        self.num_calls = 0
        self._table = table

    @property
    def ranks(self) -> int:
        """How many take part."""
        return len(self._table.laid)

    def all_gather(self, values: NDArray, sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        return self._swap([values] * self.ranks, sizes)

    def all_to_all(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        """As documented on `Exchange`."""
        return self._swap(parts, sizes)

    def maximum(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """As documented on `Exchange`."""
        return np.max(self._swap([values] * self.ranks, [values.size] * self.ranks), axis=0)

    def _swap(self, parts: Sequence[NDArray], sizes: Sequence[int]) -> list[NDArray]:
        self._table.laid[self.rank] = parts
        self._table.barrier.wait()
        got = [laid[self.rank].copy() for laid in self._table.laid]
        self._table.barrier.wait()
        # A network would hang or mix up arrays here.
        assert [a.size for a in got] == list(sizes), f"rank {self.rank} expected sizes {sizes}"
        assert len({a.dtype for a in got}) == 1 and all(a.ndim == 1 for a in got)
        self.bytes_received += sum(a.nbytes for rank, a in enumerate(got) if rank != self.rank)
        self.num_calls += 1
        return got


def run_in_threads(ranks: int, work: Callable[[ThreadExchange], Result]) -> list[Result]:
    """Do the work of several ranks in this process.

    Args:
        ranks: >= 1.
        work: Called once for each rank.

    Returns:
        What the calls return, by rank.

    Raises:
        Exception: What the first rank raised that raised anything; the others are released.

    Example:
        >>> run_in_threads(2, lambda exchange: int(exchange.maximum(np.array([exchange.rank]))[0]))
        [1, 1]
    """
    table = _Table(ranks)

    def run(rank: int) -> Result:
        done = False
        try:
            result = work(ThreadExchange(rank, table))
            done = True
            return result
        finally:
            if not done:
                table.barrier.abort()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # A rank that waited for one that failed has nothing to say of its own.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
