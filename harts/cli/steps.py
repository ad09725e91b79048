"""Files to training steps: prefix trees, and how many tokens are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from harts.data import Trajectory, TrajectoryBatch
from harts.data.readers import GroupShape, read_shapes, read_trajectories
from harts.data.readers.lines import read_objects
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


def read_steps(path: Path, groups_per_step: int | None) -> Iterator[StepShape]:
    """Stream the steps of a file of trajectories or shapes.

    Args:
        path: .jsonl or .jsonl.gz; its first object tells which of the two it is.
        groups_per_step: Groups that form a step, in the order of the file; None for one step of all. The
            trajectories of a group stand together.

    Raises:
        ValueError: Naming file, line and field, or if the file holds nothing.
    """
    first = next((fields for _, fields in read_objects(path)), None)
    if first is None:
        raise ValueError(f"{path} is empty, expected one trajectory or one group a line.")
    if "token_ids" in first:
        yield from map(_of_trajectories, _batched(_groups(read_trajectories(path)), groups_per_step))
    elif "length" in first:
        yield from map(step_of_groups, _batched(read_shapes(path), groups_per_step))
    else:
        raise ValueError(
            f"{path}, line 1: fields {', '.join(sorted(first)) or 'none'}, expected token_ids (trajectories) or "
            "length and lcp (shapes)."
        )


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


def _of_trajectories(groups: list[list[Trajectory]]) -> StepShape:
    batch = TrajectoryBatch.of([trajectory for group in groups for trajectory in group])
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


def _groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    group: list[Trajectory] = []
    for trajectory in trajectories:
        if group and trajectory.group_id != group[-1].group_id:
            yield group
            group = []
        group.append(trajectory)
    yield group


def _batched(items: Iterable[T], size: int | None) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
