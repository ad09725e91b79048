"""Which trajectories run together: `plan.slots[dp_rank][slot]`.

Pure functions of plain data, so that every rank arrives at the same plan and can compare digests. For now one rank,
its microbatches cut from the lexicographic order of the trajectories.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostModel
from harts.tree import PrefixTree

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Trajectories that run in one forward and backward pass."""

    trajectories: tuple[int, ...]
    """Trajectory numbers, in lexicographic order of their tokens."""
    num_tokens: int
    """Tokens computed: distinct ones with sharing, all without; padding is not counted."""
    num_trajectory_tokens: int
    """Tokens of all its trajectories."""
    predicted_work: float
    """FLOPs that the cost model predicts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every trajectory of a step in one slot of one rank.

    Example:
        The words abcde, abxy, abcz, abc with max_tokens_per_microbatch=6 become two microbatches of one rank: abc,
        abcde and abcz (6 distinct tokens), then abxy (4).
    """

    slots: tuple[tuple[Microbatch, ...], ...]
    """`slots[dp_rank][slot]`, as many slots on every rank."""
    max_tokens_per_microbatch: int
    """The limit the plan was made for: distinct tokens with sharing, trajectories x longest (right-padded) without."""
    sharing: bool
    """Whether shared prefixes are computed once in each microbatch."""

    @property
    def digest(self) -> str:
        """SHA-256 of the JSON, in hex. Equal on all ranks exactly if the plans are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """One line with sorted keys; numbers survive a round trip exactly."""
        fields = {"version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: If the text is no plan, is of another version, or its ranks differ in their number of slots.
        """
        fields = json.loads(text)
        version = fields.get("version") if isinstance(fields, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"Got a plan of version {version}, expected {FORMAT_VERSION}. Make the plan again.")
        try:
            plan = cls(
                slots=tuple(tuple(_read_microbatch(slot) for slot in rank) for rank in fields["slots"]),
                max_tokens_per_microbatch=fields["max_tokens_per_microbatch"],
                sharing=fields["sharing"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"The plan is damaged: {error!r}. Expected JSON as `Plan.to_json` writes it.") from error
        if len({len(rank) for rank in plan.slots}) != 1:
            raise ValueError(f"Ranks have {[len(rank) for rank in plan.slots]} slots, expected one number for all.")
        return plan


def make_plan(tree: PrefixTree, *, max_tokens_per_microbatch: int, cost: CostModel, sharing: bool = True) -> Plan:
    """Fill microbatches up to a token limit, on one rank.

    With sharing, the lexicographic order is cut as late as the limit on distinct tokens allows. A part of an interval
    never has more distinct tokens than the interval, so for this order no other cuts make fewer microbatches. Without
    sharing, trajectories are sorted by length, longest first, because a batch is padded to its longest.

    Args:
        tree: The tree of the step's trajectories.
        max_tokens_per_microbatch: Most tokens one pass may hold, as documented on `Plan`.
        cost: Predicts the work of each microbatch; it moves no cut.
        sharing: False plans for flat execution.

    Returns:
        The plan. Neither the order of the batch nor duplicates change its work.

    Raises:
        ValueError: If a trajectory alone exceeds the limit.
    """
    _check_longest(tree, max_tokens_per_microbatch)
    microbatches: list[Microbatch] = []
    parts = _shared_parts if sharing else _padded_parts
    for place in parts(tree, max_tokens_per_microbatch):
        length_N = tree.length_N[place]
        # The first of a microbatch shares with nothing in it.
        lcp_N = np.concatenate([[0], tree.lcp_N[place[1:]]]) if sharing else np.zeros_like(length_N)
        microbatches.append(
            Microbatch(
                trajectories=tuple(tree.order_N[place].tolist()),
                num_tokens=int((length_N - lcp_N).sum()),
                num_trajectory_tokens=int(length_N.sum()),
                predicted_work=cost.work(length_N, lcp_N),
            )
        )
    return Plan(slots=(tuple(microbatches),), max_tokens_per_microbatch=max_tokens_per_microbatch, sharing=sharing)


def _check_longest(tree: PrefixTree, limit: int) -> None:
    longest = int(tree.length_N.max())
    if longest > limit:
        number = int(tree.order_N[tree.length_N == longest].min())
        over = int((tree.length_N > limit).sum())
        raise ValueError(
            f"Trajectory {number} has {longest} tokens but max_tokens_per_microbatch is {limit} ({over} in all are "
            f"longer). Raise the limit to at least {longest}, or shorten the rollout."
        )


def _shared_parts(tree: PrefixTree, limit: int) -> Iterator[NDArray[np.int64]]:
    """Places in lexicographic order, cut where the next trajectory's new tokens would exceed the limit."""
    total = np.concatenate([[0], np.cumsum(tree.length_N - tree.lcp_N)])
    begin = 0
    while begin < tree.length_N.size:
        # The first trajectory's shared prefix has to be computed again here.
        end = int(np.searchsorted(total, total[begin] - tree.lcp_N[begin] + limit, side="right")) - 1
        yield np.arange(begin, end)
        begin = end


def _padded_parts(tree: PrefixTree, limit: int) -> Iterator[NDArray[np.int64]]:
    """Places by descending length, as many at a time as fit when padded to the first."""
    place = np.argsort(-tree.length_N, kind="stable")
    begin = 0
    while begin < place.size:
        end = begin + limit // int(tree.length_N[place[begin]])
        yield np.sort(place[begin:end])
        begin = end


def _read_microbatch(fields: dict[str, object]) -> Microbatch:
    return Microbatch(**{**fields, "trajectories": tuple(fields["trajectories"])})  # type: ignore[arg-type]
