"""Which trajectories run together: `plan.slots[dp_rank][slot]`.

Pure functions of plain data, so that every rank arrives at the same plan and can compare digests. The compiled parts
of the planner are imported at first use.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostModel
from harts.tree import PrefixTree

if TYPE_CHECKING:
    from harts.plan.slots import Places

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Trajectories that run in one forward and backward pass."""

    trajectories: tuple[int, ...]
    """Trajectory numbers, in lexicographic order of their tokens. Empty where a rank has nothing to do in a slot that
    others need: it takes part in communication with zero weight."""
    num_tokens: int
    """Tokens computed: distinct ones with sharing, all without; padding is not counted."""
    num_trajectory_tokens: int
    """Tokens of all its trajectories."""
    predicted_work: float
    """FLOPs that the cost model predicts, without the overhead of a microbatch."""


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
    """The limit the plan was made for: distinct tokens with sharing, trajectories x longest (right-padded, to a
    multiple of 8 from 64 tokens on) without."""
    sharing: bool
    """Whether shared prefixes are computed once in each microbatch."""
    barrier: bool
    """Whether ranks wait for each other after every slot."""
    overhead: float
    """FLOPs that a slot costs beside its work."""
    lower_bound: float
    """FLOPs. No plan for these trajectories, ranks and limit has a smaller makespan."""
    peers: dict[str, float] = field(hash=False)
    """Makespan in FLOPs of other ways to plan the same step, by name; none is smaller than this plan's. Empty without
    sharing."""

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return len(self.slots)

    @property
    def num_slots(self) -> int:
        """Slots of each rank."""
        return len(self.slots[0])

    @property
    def makespan(self) -> float:
        """FLOPs until the last rank ends: with barriers the sum over slots of the largest, without the largest sum."""
        if self.barrier:
            heights = [max(m.predicted_work for m in slot) for slot in zip(*self.slots, strict=True)]
            return math.fsum(heights) + self.num_slots * self.overhead
        return max(_rank_work(rank) for rank in self.slots) + self.num_slots * self.overhead

    @property
    def imbalance_p95(self) -> float:
        """95th percentile over slots (nearest rank) of the largest over the mean work of the ranks, less 1, >= 0.

        Without barriers the ranks' sums take the place of a slot.
        """
        if self.barrier:
            columns = [[m.predicted_work for m in slot] for slot in zip(*self.slots, strict=True)]
        else:
            columns = [[_rank_work(rank) for rank in self.slots]]
        means = [math.fsum(column) / self.ranks for column in columns]
        excess = sorted(max(c) / mean - 1 if mean > 0 else 0.0 for c, mean in zip(columns, means, strict=True))
        return max(0.0, excess[math.ceil(0.95 * len(excess)) - 1])

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
        version = fields.pop("version", None) if isinstance(fields, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"Got a plan of version {version}, expected {FORMAT_VERSION}. Make the plan again.")
        try:
            slots = tuple(tuple(_read_microbatch(slot) for slot in rank) for rank in fields.pop("slots"))
            plan = cls(slots=slots, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"The plan is damaged: {error!r}. Expected JSON as `Plan.to_json` writes it.") from error
        if len({len(rank) for rank in plan.slots}) != 1:
            raise ValueError(f"Ranks have {[len(rank) for rank in plan.slots]} slots, expected one number for all.")
        return plan


def make_plan(
    tree: PrefixTree,
    *,
    max_tokens_per_microbatch: int,
    cost: CostModel,
    ranks: int = 1,
    barrier: bool = True,
    sharing: bool = True,
    seed: int = 0,
) -> Plan:
    """Put trajectories in microbatches, and those in slots of data-parallel ranks, for the shortest step.

    With sharing, a shared prefix is computed once in each microbatch that needs it, so fewer cuts mean less work and
    more cuts better balance; the planner searches for the shortest makespan. Without sharing, trajectories are sorted
    by length, longest first, because a batch is padded to its longest.

    Args:
        tree: The tree of the step's trajectories.
        max_tokens_per_microbatch: Most tokens one pass may hold, as documented on `Plan`.
        cost: Predicts the work of paths and the overhead of a microbatch.
        ranks: Data-parallel ranks, >= 1. All get the same number of slots.
        barrier: Whether ranks wait for each other after every slot, as they do if parameters are sharded or experts
            or pipeline stages are parallel. Without, only the end of the step is common.
        sharing: False plans for flat execution.
        seed: Of the search on small steps.

    Returns:
        The plan, the same bits for the same arguments on every machine. Neither the order of the batch nor duplicates
        nor trajectories inside others change its makespan, if prefixes are shared.

    Raises:
        ValueError: If a trajectory alone exceeds the limit, or there is no rank.

    Example:
        >>> from harts.tree import tree_from_lcp
        >>> tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])
        >>> cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
        >>> plan = make_plan(tree, max_tokens_per_microbatch=8, cost=cost, ranks=2)
        >>> plan.makespan, plan.lower_bound
        (6.0, 6.0)
    """
    _check(tree, max_tokens_per_microbatch, ranks)
    step = (tree, cost, max_tokens_per_microbatch, ranks, barrier)
    return _plan_shared(*step, seed=seed) if sharing else _plan_padded(*step)


def _plan_shared(tree: PrefixTree, cost: CostModel, limit: int, ranks: int, barrier: bool, *, seed: int) -> Plan:
    from harts.plan.problem import make_problem
    from harts.plan.search import search
    from harts.plan.slots import shared_in_bins

    problem = make_problem(tree, cost=cost, ranks=ranks, limit=limit, barrier=barrier)
    found = search(problem, seed=seed)
    chosen = found.schedule
    bin_N = chosen.bin_J[problem.job_N]
    lcp_N = shared_in_bins(tree.parent_S, tree.end_S, tree.tail_N, bin_N)
    return Plan(
        slots=fill_slots(tree, cost, bin_N, lcp_N, chosen.places),
        max_tokens_per_microbatch=limit,
        sharing=True,
        barrier=barrier,
        overhead=cost.flops_per_microbatch,
        lower_bound=max(found.bound.makespan - problem.rounding, 0) * problem.unit,
        peers={name: makespan * problem.unit for name, makespan in found.peers.items()},
    )


def _plan_padded(tree: PrefixTree, cost: CostModel, limit: int, ranks: int, barrier: bool) -> Plan:
    from harts.plan.flat import padded_bins
    from harts.plan.slots import place

    work_N = cost.path_work(tree.length_N)
    bin_N = padded_bins(tree.length_N, work_N, limit=limit, ranks=ranks)
    count = -(-int(bin_N.max() + 1) // ranks) * ranks
    fewest = math.ceil(math.ceil(tree.num_trajectory_tokens / limit) / ranks)
    return Plan(
        slots=fill_slots(
            tree,
            cost,
            bin_N,
            np.zeros_like(tree.lcp_N),
            place(np.bincount(bin_N, weights=work_N, minlength=count), ranks=ranks, barrier=barrier),
        ),
        max_tokens_per_microbatch=limit,
        sharing=False,
        barrier=barrier,
        overhead=cost.flops_per_microbatch,
        lower_bound=max(float(work_N.max()), math.fsum(work_N) / ranks) + fewest * cost.flops_per_microbatch,
        peers={},
    )


def fill_slots(
    tree: PrefixTree, cost: CostModel, bin_N: NDArray[np.int64], lcp_N: NDArray[np.int64], places: Places
) -> tuple[tuple[Microbatch, ...], ...]:
    """`Plan.slots` of microbatches; `bin_N` and `lcp_N`, what is shared inside one, are in the tree's order."""
    order = np.argsort(bin_N, kind="stable")
    ends = np.cumsum(np.bincount(bin_N, minlength=places.rank_B.size)).tolist()
    numbers, lengths, lcps = (a[order].tolist() for a in (tree.order_N, tree.length_N, lcp_N))
    works = (cost.path_work(tree.length_N) - cost.path_work(lcp_N))[order].tolist()
    microbatches = []
    for begin, end in zip([0, *ends[:-1]], ends, strict=True):
        num_trajectory_tokens = sum(lengths[begin:end])
        microbatches.append(
            Microbatch(
                trajectories=tuple(numbers[begin:end]),
                num_tokens=num_trajectory_tokens - sum(lcps[begin:end]),
                num_trajectory_tokens=num_trajectory_tokens,
                predicted_work=math.fsum(works[begin:end]),  # rounded once, as in `CostModel.work`
            )
        )
    by_place = np.lexsort((places.slot_B, places.rank_B)).tolist()
    num_slots = len(microbatches) // (int(places.rank_B.max()) + 1)
    ordered = [microbatches[i] for i in by_place]
    return tuple(tuple(ordered[i : i + num_slots]) for i in range(0, len(ordered), num_slots))


def _check(tree: PrefixTree, limit: int, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"Got {ranks} ranks, expected at least 1. Give the number of data-parallel ranks.")
    longest = int(tree.length_N.max())
    if longest > limit:
        number = int(tree.order_N[tree.length_N == longest].min())
        over = int((tree.length_N > limit).sum())
        raise ValueError(
            f"Trajectory {number} has {longest} tokens but max_tokens_per_microbatch is {limit} ({over} in all are "
            f"longer). Raise the limit to at least {longest}, or shorten the rollout."
        )


def _rank_work(microbatches: Sequence[Microbatch]) -> float:
    return math.fsum(m.predicted_work for m in microbatches)


def _read_microbatch(fields: dict[str, object]) -> Microbatch:
    return Microbatch(**{**fields, "trajectories": tuple(fields["trajectories"])})  # type: ignore[arg-type]
