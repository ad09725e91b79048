"""The tree of one group, and which of its tokens are trained."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from harts.data import RolloutGroup, Trajectory
from harts.data.readers import GroupShape
from harts.tree import PrefixTree, tree_from_lcp
from harts.tree.lcp import sort_tokens

Spans = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupTree:
    """A group with its prefix tree; groups share nothing with each other."""

    name: str
    """What the file calls the group."""
    tree: PrefixTree
    """Of its trajectories, numbered within the group."""
    trained_tokens: int
    """Trained tokens of all trajectories."""
    trained_S: NDArray[np.int64]
    """[S] int64. Tokens of each segment that at least one of its trajectories trains."""
    trajectories: tuple[Trajectory, ...]
    """In the order of the group; empty if the file holds shapes only."""


def group_tree(group: RolloutGroup | GroupShape) -> GroupTree:
    """Sort a group's trajectories, merge them, and count what is trained.

    Args:
        group: As `harts.read` gives it.

    Raises:
        ValueError: If a trajectory has no tokens or the lists of a shape fit no tree.

    Example:
        >>> from harts.data.trajectory import example_trajectories
        >>> found = group_tree(RolloutGroup(name="letters", trajectories=tuple(example_trajectories())))
        >>> found.tree.num_tokens, found.trained_tokens, found.trained_S.tolist()
        (8, 12, [1, 1, 2, 1, 2])
    """
    if isinstance(group, GroupShape):
        tree = tree_from_lcp(np.arange(group.length_N.size), group.length_N, group.lcp_N)
        return _with_spans(group.name, tree, _flatten(group), ())
    return _of_trajectories(group.name, group.trajectories)


def _of_trajectories(name: str, trajectories: tuple[Trajectory, ...]) -> GroupTree:
    from harts.inspect.counting import spans_of_mask

    offsets = np.cumsum([0, *(len(trajectory) for trajectory in trajectories)])
    largest = max((int(t.token_ids.max(initial=0)) for t in trajectories), default=0)
    dtype = np.int32 if largest < 2**31 else np.int64
    token_ids_F = np.empty(offsets[-1], dtype=dtype)  # half of the memory that two copies of 64 bits take
    mask_F = np.empty(offsets[-1], dtype=np.bool_)
    for trajectory, begin in zip(trajectories, offsets[:-1].tolist(), strict=True):
        token_ids_F[begin : begin + len(trajectory)] = trajectory.token_ids
        mask_F[begin : begin + len(trajectory)] = trajectory.loss_mask
    order_N, lcp_N = sort_tokens(token_ids_F, offsets, share_key_F=_share_keys(trajectories))
    tree = tree_from_lcp(order_N, np.diff(offsets)[order_N], lcp_N)
    number, begins, ends = spans_of_mask(mask_F, offsets)
    return _with_spans(name, tree, (np.argsort(order_N)[number], begins, ends), trajectories)


def _share_keys(trajectories: tuple[Trajectory, ...]) -> NDArray[np.int64] | None:
    if all(t.share_key is None for t in trajectories):
        return None
    return np.concatenate([np.zeros(len(t), np.int64) if t.share_key is None else t.share_key for t in trajectories])


def _flatten(group: GroupShape) -> Spans:
    counts = np.fromiter(map(len, group.loss_spans), dtype=np.int64, count=len(group.loss_spans))
    numbers = chain.from_iterable(chain.from_iterable(group.loss_spans))
    ends = np.fromiter(numbers, dtype=np.int64, count=2 * int(counts.sum())).reshape(-1, 2)
    place = np.repeat(np.arange(counts.size), counts)
    order = np.lexsort((ends[:, 0], place))
    return place, ends[order, 0], ends[order, 1]


def _with_spans(name: str, tree: PrefixTree, spans: Spans, trajectories: tuple[Trajectory, ...]) -> GroupTree:
    from harts.inspect.counting import covered_of_segments, spans_on_segments

    owner, first, last = spans_on_segments((tree.parent_S, tree.start_S, tree.end_S), tree.tail_N, spans)
    order = np.lexsort((first, owner))
    return GroupTree(
        name=name,
        tree=tree,
        trained_tokens=int((spans[2] - spans[1]).sum()),
        trained_S=covered_of_segments(owner[order], first[order], last[order], tree.parent_S.size),
        trajectories=trajectories,
    )
