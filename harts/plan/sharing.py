"""Whether computing shared tokens once pays, fork by fork, tree by tree and for the step.

Where paths part, one of them goes on and every other one opens a run of its own: a state, a last chunk that is not
full, and up to a chunk of replayed rows. The other way is to compute the prefix again for it. With additive costs the
two can be compared fork by fork, since leaving one fork changes the cost of no other. Rounds are waited for by the
whole step, so they enter the comparison of the step (and of a tree as if it ran alone).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostParameters
from harts.plan.size import pairs_of_path, size_of_flat, size_of_tree
from harts.tree import PrefixTree, tree_from_lcp

Sharing = Literal["auto", "always", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionCosts:
    """What both executions cost on a device. Derived from dimensions the two are one; fitted, they are two."""

    tree: CostParameters
    """Of packed trees."""
    flat: CostParameters
    """Of trajectories one by one."""
    chunk_size: int | None = None
    """C of the model's linear attention; None if it has none."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer with a window sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSharing:
    """The test of one tree: trajectories that share at least their first token."""

    num_trajectories: int
    """N of the tree."""
    ratio: float
    """Its tokens over its distinct tokens, >= 1."""
    shared: float
    """Predicted cost with every shared token computed once."""
    flat: float
    """Predicted cost with every trajectory alone."""
    num_forks: int
    """Paths that part from another."""
    num_losing_forks: int
    """Those that would cost less with their prefix computed again."""
    cut_gain: float
    """What computing these prefixes again would save, in the unit of `shared`; 0 if no fork loses."""

    @property
    def pays(self) -> bool:
        """Whether sharing costs no more than running flat."""
        return self.shared <= self.flat


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingReport:
    """The test of a step, and of each of its trees."""

    trees: tuple[TreeSharing, ...]
    """In the order of the prefix tree."""
    shared: float
    """Predicted cost of the step on trees."""
    flat: float
    """Predicted cost of the step flat."""

    @property
    def pays(self) -> bool:
        """Whether the step should run on trees."""
        return self.shared <= self.flat

    @property
    def speedup(self) -> float:
        """Predicted cost flat over that on trees."""
        return self.flat / self.shared if self.shared else math.inf

    def text(self) -> str:
        """The decision and its reasons, in a few lines."""
        losing = [t for t in self.trees if not t.pays]
        forks, bad = sum(t.num_forks for t in self.trees), sum(t.num_losing_forks for t in self.trees)
        gain = sum(t.cut_gain for t in self.trees)
        share = gain / self.shared if self.shared else 0.0
        return "\n".join(
            [
                f"sharing {'pays' if self.pays else 'does not pay'}: predicted {self.speedup:.2f}x against flat",
                f"trees: {len(self.trees) - len(losing)} of {len(self.trees)} pay",
                f"forks: {forks - bad} of {forks} pay; computing the prefixes of the other {bad} again "
                f"would save {share:.2%} of the step",
            ]
        )


def compare_sharing(tree: PrefixTree, costs: ExecutionCosts, *, loss_edges: tuple[int, int] = (0, 0)) -> SharingReport:
    """Compare sharing with flat execution, for every tree of a step and for the step.

    Args:
        tree: Of the step; it may be a forest.
        costs: Of both executions.
        loss_edges: Trained tokens of the step, distinct and in all. They count for the step, not for single trees.

    Returns:
        The report. LM head rows are counted in the step's costs only, where sharing makes them fewer.
    """
    starts = np.flatnonzero(tree.lcp_N == 0)
    ends = np.append(starts[1:], tree.lcp_N.size)
    gain_of_fork, place_of_fork = _fork_gains(tree, costs)
    first, last = np.searchsorted(place_of_fork, starts), np.searchsorted(place_of_fork, ends)
    trees = tuple(
        _compare_tree(tree, slice(starts[i], ends[i]), costs, gain_of_fork[first[i] : last[i]])
        for i in range(starts.size)
    )
    distinct, every = loss_edges
    shared_size = size_of_tree(tree, chunk_size=costs.chunk_size, windows=costs.windows, loss_edges=distinct)
    flat_size = size_of_flat(
        tree.length_N,
        has_linear_attention=costs.chunk_size is not None,
        windows=costs.windows,
        loss_edges=every,
    )
    return SharingReport(trees=trees, shared=costs.tree.predict(shared_size), flat=costs.flat.predict(flat_size))


def decide(mode: Sharing, report: SharingReport) -> bool:
    """Whether the step runs on trees.

    Raises:
        ValueError: If `mode` is none of auto, always, never.
    """
    if mode not in ("auto", "always", "never"):
        raise ValueError(f'Got sharing = {mode!r}, expected "auto", "always" or "never".')
    return report.pays if mode == "auto" else mode == "always"


def _compare_tree(
    tree: PrefixTree, places: slice, costs: ExecutionCosts, gain_of_fork: NDArray[np.float64]
) -> TreeSharing:
    part = tree_from_lcp(tree.order_N[places], tree.length_N[places], tree.lcp_N[places])
    shared = size_of_tree(part, chunk_size=costs.chunk_size, windows=costs.windows)
    flat = size_of_flat(part.length_N, has_linear_attention=costs.chunk_size is not None, windows=costs.windows)
    losing = gain_of_fork[gain_of_fork > 0]
    return TreeSharing(
        num_trajectories=part.length_N.size,
        ratio=flat.tokens / shared.tokens,
        # The step pays for its passes whatever one tree does.
        shared=costs.tree.predict(shared) - costs.tree.per_microbatch,
        flat=costs.flat.predict(flat) - costs.flat.per_microbatch,
        num_forks=gain_of_fork.size,
        num_losing_forks=losing.size,
        cut_gain=float(losing.sum()),
    )


def _fork_gains(tree: PrefixTree, costs: ExecutionCosts) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What computing its prefix again would save at each fork (negative: sharing pays), and the first place below it.

    Either way the path has a run of its own. Sharing adds the rows that it replays and the run that starts at
    the boundary before the branch; not sharing adds the prefix.
    """
    branching_S = tree.num_children_S > 1
    child = np.flatnonzero((tree.parent_S >= 0) & branching_S[tree.parent_S])
    parent = tree.parent_S[child]
    # One path goes on, say the first; which of them changes no cost.
    goes_on = np.zeros(child.size, dtype=bool)
    goes_on[np.unique(parent, return_index=True)[1]] = True
    fork = child[~goes_on]
    depth = tree.start_S[fork]
    c = costs.tree
    work = (c.per_token + c.per_expert_token) * depth + c.per_pair * pairs_of_path(depth)
    for window in costs.windows:
        work = work + c.per_window_pair * pairs_of_path(depth, window)
    if costs.chunk_size is None:
        extra = np.zeros(fork.size)
    else:
        replayed = depth % costs.chunk_size
        # The boundary's run counts in full for each fork, though forks inside one chunk share it.
        extra = c.per_replayed * replayed + c.per_run * (depth >= costs.chunk_size)
    # Pre-order: the first trajectory that ends in or below a segment is the first whose tail is no smaller.
    return extra - work, np.searchsorted(tree.tail_N, fork)
