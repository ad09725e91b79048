"""How much sharing recorded routes cost: tokens that agree but went to other experts are computed apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harts.data import Trajectory, TrajectoryBatch
from harts.tree.prefix_tree import build_prefix_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteConflicts:
    """Sizes of a step's tree with and without its recorded routes."""

    num_tokens_flat: int
    """Tokens of all trajectories."""
    num_tokens_distinct: int
    """Distinct tokens, those with different routes apart."""
    num_tokens_without_routes: int
    """Distinct tokens if routes did not matter."""

    @property
    def cost(self) -> float:
        """>= 1. How many times as many tokens are computed for the sake of the routes."""
        return self.num_tokens_distinct / self.num_tokens_without_routes


def route_conflicts(trajectories: Sequence[Trajectory]) -> RouteConflicts:
    """Compare the tree of some trajectories with the one that they would have without routes.

    Args:
        trajectories: Of one step.

    Example:
        >>> import numpy as np
        >>> one, other = np.zeros((3, 1, 1), dtype=int), np.array([0, 0, 1]).reshape(3, 1, 1)
        >>> step = [Trajectory.of([5, 6, 7], routes=routes) for routes in (one, one, other)]
        >>> route_conflicts(step)
        RouteConflicts(num_tokens_flat=9, num_tokens_distinct=4, num_tokens_without_routes=3)
    """
    tree = build_prefix_tree(TrajectoryBatch.of(trajectories))
    merged = build_prefix_tree(TrajectoryBatch.of([replace(t, routes=None) for t in trajectories]))
    return RouteConflicts(
        num_tokens_flat=tree.num_trajectory_tokens,
        num_tokens_distinct=tree.num_tokens,
        num_tokens_without_routes=merged.num_tokens,
    )
