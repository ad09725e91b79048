"""Groups to training steps: prefix trees, and how many tokens are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from harts.data import RolloutGroup, TrajectoryBatch
from harts.data.readers import GroupShape
from harts.plan.size import count_loss_edges
from harts.tree import PrefixTree, build_prefix_tree, tree_from_lcp

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShape:
    """What a planner needs of one step."""

    tree: PrefixTree
    """Of all its trajectories."""
    num_groups: int
    """Groups of trajectories."""
    loss_edges: int
    """Distinct trained tokens."""
    trained_tokens: int
    """Trained tokens of all trajectories."""


def read_steps(groups: Iterable[RolloutGroup | GroupShape], groups_per_step: int | None) -> Iterator[StepShape]:
    """Form steps of groups as they come.

    Args:
        groups: Of one file.
        groups_per_step: Groups that form a step; None for one step of all.

    Raises:
        ValueError: As `groups` does, or if trajectories do not fit together.
    """
    for batch in _batched(groups, groups_per_step):
        shapes = [group for group in batch if isinstance(group, GroupShape)]
        rollouts = [group for group in batch if isinstance(group, RolloutGroup)]
        # A file holds the ones or the others.
        assert not shapes or not rollouts
        yield step_of_groups(shapes) if shapes else _of_rollouts(rollouts)


def step_of_groups(groups: list[GroupShape]) -> StepShape:
    """One step of some groups, which share nothing with each other."""
    length_N = np.concatenate([group.length_N for group in groups])
    lcp_N = np.concatenate([group.lcp_N for group in groups])
    spans = [spans for group in groups for spans in group.loss_spans]
    return StepShape(
        tree=tree_from_lcp(np.arange(length_N.size), length_N, lcp_N),
        num_groups=len(groups),
        loss_edges=count_loss_edges(length_N.tolist(), lcp_N.tolist(), spans),
        trained_tokens=sum(end - begin for trajectory in spans for begin, end in trajectory),
    )


def _of_rollouts(groups: list[RolloutGroup]) -> StepShape:
    batch = TrajectoryBatch.of([trajectory for group in groups for trajectory in group.trajectories])
    tree = build_prefix_tree(batch)
    spans = []
    for number in tree.order_N:
        trained = batch.trained_P[batch.policy_tokens(np.array([number]))] - batch.offsets[number]
        breaks = np.flatnonzero(np.diff(trained) > 1) + 1
        spans.append([(int(part[0]), int(part[-1]) + 1) for part in np.split(trained, breaks) if part.size])
    return StepShape(
        tree=tree,
        num_groups=len(groups),
        loss_edges=count_loss_edges(tree.length_N.tolist(), tree.lcp_N.tolist(), spans),
        trained_tokens=batch.trained_P.size,
    )


def _batched(items: Iterable[T], size: int | None) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
