"""What has to travel to a rank: each distinct token of the trajectories that come once, and none that the rank has.

Order and common prefixes are known to all ranks, so receiver and senders find the same without asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrivals:
    """Trajectories that come to one rank, in lexicographic order, `n` of them."""

    numbers: NDArray[np.int64]
    """[n] int64. Number of each in the step."""
    source: NDArray[np.int64]
    """[n] int64. Trajectory that begins with the same tokens: one that the rank holds, or that comes before this one,
    from whichever rank; -1 if there is none."""
    shared: NDArray[np.int64]
    """[n] int64. Tokens that are taken from there; those behind them travel. 0 if there is none."""

    def take(self, which: NDArray[np.bool_]) -> Arrivals:
        """Some of them, such as those from one rank."""
        return Arrivals(numbers=self.numbers[which], source=self.source[which], shared=self.shared[which])


def plan_arrivals(
    receiver: int,
    *,
    rank_N: NDArray[np.int64],
    target_N: NDArray[np.int64],
    order_N: NDArray[np.int64],
    lcp_N: NDArray[np.int64],
) -> Arrivals:
    """Find what comes to a rank, and what of it the rank has.

    Args:
        receiver: The rank.
        rank_N: [N] int64, by number. Rank that holds each trajectory.
        target_N: [N] int64, by number. Rank that each is sent to.
        order_N: [N] int64. Numbers in lexicographic order.
        lcp_N: [N] int64, in that order. Tokens shared with the one before; 0 for the first.

    Example:
        >>> order_N, lcp_N = np.array([3, 0, 2, 1]), np.array([0, 3, 3, 2])  # abc, abcde, abcz, abxy
        >>> rank_N, target_N = np.array([0, 1, 0, 0]), np.array([1, 1, 1, 0])
        >>> plan_arrivals(1, rank_N=rank_N, target_N=target_N, order_N=order_N, lcp_N=lcp_N)  # rank 1 holds abxy
        Arrivals(numbers=array([0, 2]), source=array([1, 0]), shared=array([2, 3]))
    """
    held_N = rank_N[order_N] == receiver
    place = np.flatnonzero(held_N | (target_N[order_N] == receiver))
    if held_N[place].all():
        nothing = np.zeros(0, dtype=np.int64)
        return Arrivals(numbers=nothing, source=nothing, shared=nothing)
    held, number = held_N[place], order_N[place]
    before = _shared_with_last(lcp_N, place)
    following, after = _shared_with_next_held(held, before)
    source = np.where(after > before, number[following], np.roll(number, 1))
    shared = np.maximum(before, after)
    come = ~held
    return Arrivals(numbers=number[come], source=np.where(shared > 0, source, -1)[come], shared=shared[come])


def _shared_with_last(lcp_N: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens that each of some trajectories shares with the one before it among them; 0 for the first."""
    shared = np.zeros_like(place)
    if place.size > 1:
        shared[1:] = np.minimum.reduceat(lcp_N[: place[-1] + 1], place[:-1] + 1)
    return shared


def _shared_with_next_held(
    held: NDArray[np.bool_], before: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The next trajectory that is held, behind each; and tokens that both share, 0 if there is none."""
    at = np.flatnonzero(held)
    last = held.size - 1
    following = np.append(at, last)[np.searchsorted(at, np.arange(held.size), side="right")]
    # From back to front the least common prefix since the last one held. Every held one starts anew, far below all
    # that the running minimum has seen.
    step = np.append(before[1:], 0)[::-1]
    depth = np.cumsum(np.append(held[1:], False)[::-1]) * (before.max() + 1)
    return following, (np.minimum.accumulate(step - depth) + depth)[::-1]
