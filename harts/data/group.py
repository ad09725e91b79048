"""The trajectories of one task, as a file holds them."""

from __future__ import annotations

from dataclasses import dataclass

from harts.data.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RolloutGroup:
    """All trajectories of one task or prompt.

    Example:
        >>> from harts.data.trajectory import example_trajectories
        >>> len(RolloutGroup(name="letters", trajectories=tuple(example_trajectories())).trajectories)
        4
    """

    name: str
    """What the file calls the task; empty if it does not."""
    trajectories: tuple[Trajectory, ...]
    """At least one, in the order of the file. `group_id` is equal within a group and distinct between the groups of
    a file."""
