"""Plays plans for many ranks with the costs of every part of a microbatch, and says where the time goes.

Rank-seconds of a step are divided into useful work (every distinct token once, spread evenly), prefixes that several
microbatches compute, the cost of cutting a step into passes (overheads, rounds, states, replays), and waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.plan.plan import Plan
from harts.plan.sharing import ExecutionCosts
from harts.plan.size import size_of_tree
from harts.tree import PrefixTree, tree_from_lcp


@dataclass(frozen=True, kw_only=True, slots=True)
class Playback:
    """Where the time of a step goes. The four shares add up to 1."""

    seconds: float
    """Of the step (FLOPs of the slowest path if the costs are not fitted)."""
    useful: float
    """Share of rank-time for work that one microbatch of all trajectories would do too: the efficiency."""
    repeated: float
    """Share for prefixes computed in more than one microbatch."""
    passes: float
    """Share for overheads, rounds, states and replays, less what one microbatch would have of states and replays."""
    waiting: float
    """Share in which ranks wait for slower ones."""
    bound_over_ideal: float
    """Lower bound of the planner over useful work spread evenly, >= 1: what no plan can avoid."""

    @property
    def limit(self) -> str:
        """What costs the most beside useful work."""
        if self.useful > 0.98:
            return "nothing"
        reasons = {
            "prefixes computed on several ranks": self.repeated,
            "overheads and rounds": self.passes,
            "waiting": self.waiting,
        }
        largest = max(reasons, key=lambda name: reasons[name])
        # The bound knows the longest trajectory and the prefixes that have to be on several ranks.
        if largest != "overheads and rounds" and self.bound_over_ideal - 1 > 0.5 * (1 / self.useful - 1):
            return f"{largest}, most of it unavoidable"
        return largest


def play(plan: Plan, tree: PrefixTree, costs: ExecutionCosts, *, jitter: float = 0.0, seed: int = 0) -> Playback:
    """Play a plan once.

    Args:
        plan: With sharing, of this tree.
        tree: Of the step.
        costs: Those of trees count.
        jitter: Standard deviation of the logarithm of each microbatch's time: how unevenly ranks run.
        seed: Of the jitter.

    Raises:
        ValueError: If the plan runs flat; there is no sharing to lose.
    """
    if not plan.sharing:
        raise ValueError("Got a plan for flat execution, expected one with sharing. Plan with sharing=True.")
    whole = size_of_tree(tree, chunk_size=costs.chunk_size, windows=costs.windows)
    # One microbatch of everything pays for its tokens, states and replays, but not for being a pass.
    useful = costs.tree.predict(whole) - costs.tree.per_round * whole.rounds - costs.tree.per_microbatch
    seconds, depth_work, whole_work = [], 0.0, _depth_work(tree, costs)
    for part in microbatch_trees(plan, tree):
        if part is None:
            seconds.append(costs.tree.per_microbatch)
            continue
        seconds.append(costs.tree.predict(size_of_tree(part, chunk_size=costs.chunk_size, windows=costs.windows)))
        depth_work += _depth_work(part, costs)
    time_RS = np.array(seconds).reshape(plan.ranks, plan.num_slots)
    if jitter:
        time_RS = time_RS * np.exp(jitter * np.random.default_rng(seed).standard_normal(time_RS.shape))
    step = time_RS.max(axis=0).sum() if plan.barrier else time_RS.sum(axis=1).max()
    total, busy = float(step * plan.ranks), float(time_RS.sum())
    repeated = depth_work - whole_work
    return Playback(
        seconds=float(step),
        useful=useful / total,
        repeated=repeated / total,
        passes=(busy - repeated - useful) / total,
        waiting=(total - busy) / total,
        bound_over_ideal=max(1.0, plan.lower_bound * plan.ranks / _unrepeated(plan, repeated, whole_work)),
    )


def _unrepeated(plan: Plan, repeated: float, whole: float) -> float:
    """Work of the step without repeated prefixes, in the plan's unit."""
    planned = sum(m.predicted_work for rank in plan.slots for m in rank)
    return planned * whole / (whole + repeated)


def _depth_work(tree: PrefixTree, costs: ExecutionCosts) -> float:
    """Cost of a tree's tokens and pairs alone."""
    size = size_of_tree(tree, windows=costs.windows)
    return costs.tree.predict(size) - costs.tree.per_microbatch


def microbatch_trees(plan: Plan, tree: PrefixTree) -> Iterator[PrefixTree | None]:
    """The tree of every microbatch, rank by rank; None for an empty one."""
    place = np.empty(tree.order_N.size, dtype=np.int64)
    place[tree.order_N] = np.arange(tree.order_N.size)
    least = _RangeMinimum(tree.lcp_N)
    for rank in plan.slots:
        for microbatch in rank:
            if not microbatch.trajectories:
                yield None
                continue
            position = place[list(microbatch.trajectories)]
            lcp_N = np.concatenate([[0], least(position[:-1] + 1, position[1:] + 1)])
            yield tree_from_lcp(tree.order_N[position], tree.length_N[position], lcp_N)


class _RangeMinimum:
    """Minima of half-open ranges of one array, O(1) each after O(N log N)."""

    def __init__(self, values: NDArray[np.int64]) -> None:
        self._levels = [values.astype(np.int32)]
        width = 1
        while 2 * width <= values.size:
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))
            width *= 2

    def __call__(self, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
        level = np.log2(end - begin).astype(np.int64)
        minima = np.empty(begin.size, dtype=np.int64)
        for number in np.unique(level):
            chosen = level == number
            values = self._levels[number]
            minima[chosen] = np.minimum(values[begin[chosen]], values[end[chosen] - (1 << int(number))])
        return minima


def heavy_tailed(num_trajectories: int, *, seed: int = 0) -> PrefixTree:
    """Sixteen siblings a prompt; prompts and answers with Pareto tails, so that a few are hundreds of times as long."""
    rng = np.random.default_rng(seed)
    groups = -(-num_trajectories // 16)
    prompt = np.minimum(500 * (1 + rng.pareto(1.5, groups)), 100_000).astype(np.int64)
    prompt_N = np.repeat(prompt, 16)[:num_trajectories]
    answer_N = np.minimum(400 * (1 + rng.pareto(1.2, num_trajectories)), 100_000).astype(np.int64)
    first_N = np.arange(num_trajectories) % 16 == 0
    return _tree(prompt_N + answer_N, np.where(first_N, 0, prompt_N))


def per_call(num_trajectories: int, *, seed: int = 0) -> PrefixTree:
    """One trajectory a call: eight attempts at a task, twenty calls each, the last ten on rewritten context."""
    rng = np.random.default_rng(seed)
    call_N = np.arange(num_trajectories) % 20
    attempt_N = np.arange(num_trajectories) // 20
    system = 1500 + rng.integers(0, 4000, attempt_N[-1] // 8 + 1)
    system_N = system[attempt_N // 8]
    grows_N = 200 + rng.geometric(1 / 600, num_trajectories)
    total = np.cumsum(grows_N)
    before_attempt = np.concatenate([[0], total[19::20]])[attempt_N]
    length_N = system_N + total - before_attempt
    # Rewriting shortens old observations: the context parts from the one before at the middle.
    previous_N = np.concatenate([[0], length_N[:-1]])
    rewritten_N = np.minimum(previous_N - 1, system_N + (previous_N - system_N) // 2)
    lcp_N = np.where(call_N == 0, system_N, np.where(call_N < 10, previous_N, rewritten_N))
    lcp_N[(call_N == 0) & (attempt_N % 8 == 0)] = 0
    return _tree(length_N, lcp_N)


def tree_search(num_trajectories: int, *, seed: int = 0) -> PrefixTree:
    """Search trees of a thousand leaves: nodes of 256 tokens, four to about thirty deep, parting anywhere."""
    rng = np.random.default_rng(seed)
    depth_N = 4 + rng.poisson(8, num_trajectories) + rng.geometric(0.3, num_trajectories)
    parts_N = np.zeros(num_trajectories, dtype=np.int64)
    least = np.minimum(depth_N[1:], depth_N[:-1])
    # Most leaves part near the bottom, as siblings do.
    parts_N[1:] = np.maximum(1, least - rng.geometric(0.35, num_trajectories - 1))
    parts_N[::1000] = 0
    return _tree(1000 + 256 * depth_N, np.where(parts_N > 0, 1000 + 256 * (parts_N - 1), 0))


WORKLOADS = {"heavy-tailed": heavy_tailed, "per-call": per_call, "tree search": tree_search}
"""Makers of large steps, by name."""


def _tree(length_N: NDArray[np.int64], lcp_N: NDArray[np.int64]) -> PrefixTree:
    return tree_from_lcp(np.arange(length_N.size), length_N, lcp_N)
