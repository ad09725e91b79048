"""Does a branch feel its siblings? Other tokens in some branches must leave everything outside their subtrees alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from harts.check.differences import relative_rows
from harts.check.recording import Recording, one_tree, record
from harts.data import Trajectory, TrajectoryBatch
from harts.data.ragged import ranges
from harts.layout.packed import flat_to_packed
from harts.models import TreeModel
from harts.tree import PrefixTree, build_prefix_tree

TRIES = 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Perturbation:
    """The same tree with other tokens in some branches."""

    trajectories: Sequence[Trajectory]
    """With the other tokens."""
    outside_F: NDArray[np.bool_]
    """[F] bool. Tokens of the trajectories that neither changed nor follow a change."""


def perturbations(trajectories: Sequence[Trajectory], vocab_size: int, *, seed: int = 0) -> list[Perturbation]:
    """Change every second branch of every branch point, then the others, so that each side is tested against the
    other.

    Args:
        trajectories: Of one step.
        vocab_size: W, from which the new tokens are drawn.
        seed: Of the new tokens.

    Returns:
        None, one or two; none if nothing branches.
    """
    batch = TrajectoryBatch.of(trajectories)
    tree = build_prefix_tree(batch)
    segment_T = np.repeat(np.arange(tree.parent_S.size), tree.end_S - tree.start_S)
    packed_F = flat_to_packed(tree)
    place_F = ranges(batch.offsets[tree.order_N], tree.length_N)
    ids_T = np.empty(tree.num_tokens, dtype=np.int64)
    ids_T[packed_F] = batch.token_ids_F[place_F]
    rng, found = np.random.default_rng(seed), []
    for side in (0, 1):
        changed_S, new_T = _change(tree, ids_T, side, vocab_size, rng)
        if not changed_S.any():
            continue
        new_F, outside_F = np.empty(packed_F.size, dtype=np.int64), np.empty(packed_F.size, dtype=bool)
        new_F[place_F] = new_T[packed_F]
        outside_F[place_F] = ~_with_descendants(changed_S, tree)[segment_T[packed_F]]
        words = np.split(new_F, batch.offsets[1:-1])
        found.append(
            Perturbation(
                trajectories=[replace(t, token_ids=ids) for t, ids in zip(trajectories, words, strict=True)],
                outside_F=outside_F,
            )
        )
    return found


def leaks(model: TreeModel, trajectories: Sequence[Trajectory], tree: Recording) -> dict[str, float]:
    """How much mixing layers' outputs move outside the changed branches.

    Args:
        model: Prepared.
        trajectories: Of the recording.
        tree: Recorded as one tree.

    Returns:
        The largest relative difference of a token's output, by layer; zeros if nothing branches.
    """
    moved = dict.fromkeys(tree.layers, 0.0)
    for changed in perturbations(trajectories, model.vocab_size):
        plan = one_tree(build_prefix_tree(TrajectoryBatch.of(changed.trajectories)))
        recording = record(model, changed.trajectories, plan)
        outside = torch.from_numpy(changed.outside_F)
        for name, output in tree.layers.items():
            moved[name] = max(moved[name], relative_rows(recording.layers[name][outside], output[outside]))
    return moved


def _change(
    tree: PrefixTree, ids_T: NDArray[np.int64], side: int, vocab_size: int, rng: np.random.Generator
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Other tokens in the branches of one side. Branches of one point keep different first tokens, so the tree keeps
    its shape; where the vocabulary is too small for that, a branch stays as it is."""
    changed_S, new_T = np.zeros(tree.parent_S.size, dtype=bool), ids_T.copy()
    order = np.argsort(tree.parent_S, kind="stable")
    for siblings in np.split(order, np.flatnonzero(np.diff(tree.parent_S[order])) + 1):
        first = {int(ids_T[tree.offset_S[s]]) for s in siblings}
        for segment in siblings[side::2] if siblings.size > 1 else []:
            begin = tree.offset_S[segment]
            end = begin + tree.end_S[segment] - tree.start_S[segment]
            for shift in rng.integers(1, vocab_size, TRIES):
                new = (ids_T[begin:end] + shift) % vocab_size
                if int(new[0]) not in first:
                    first.add(int(new[0]))
                    new_T[begin:end], changed_S[segment] = new, True
                    break
    return changed_S, new_T


def _with_descendants(changed_S: NDArray[np.bool_], tree: PrefixTree) -> NDArray[np.bool_]:
    affected_S = changed_S.copy()
    for segment, parent in enumerate(tree.parent_S.tolist()):  # parents come first
        if parent >= 0 and affected_S[parent]:
            affected_S[segment] = True
    return affected_S
