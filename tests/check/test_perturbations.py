"""Other tokens in some branches: the tree keeps its shape, and what lies outside is known."""

from __future__ import annotations

import numpy as np
import pytest

from harts.check.leak import perturbations
from harts.check.synthetic import synthetic_rollouts
from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.tree import build_prefix_tree
from tests.cases import CASES, VOCAB_SIZE, Case, trajectories_of


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_tree_keeps_its_shape_and_outside_tokens_their_paths(case: Case):
    trajectories = trajectories_of(case)
    before = build_prefix_tree(TrajectoryBatch.of(trajectories))
    for changed in perturbations(trajectories, VOCAB_SIZE):
        batch = TrajectoryBatch.of(changed.trajectories)
        after = build_prefix_tree(batch)
        assert sorted(after.end_S - after.start_S) == sorted(before.end_S - before.start_S)
        assert sorted(after.multiplicity_S) == sorted(before.multiplicity_S)
        for i, trajectory in enumerate(trajectories):
            outside = changed.outside_F[batch.offsets[i] : batch.offsets[i + 1]]
            # A prefix: once a token has changed, all that follow it are inside.
            assert (np.diff(outside.astype(int)) <= 0).all()
            same = trajectory.token_ids == changed.trajectories[i].token_ids
            assert same[outside].all()
            if not outside.all():
                assert not same[outside.sum()]


def test_both_sides_of_every_branch_point_are_changed_in_turn():
    trajectories = example_trajectories()
    sides = [
        ["".join("o" if o else "." for o in part) for part in np.split(p.outside_F, [5, 9, 13])]
        for p in perturbations(trajectories, 1000)
    ]
    # abcde abxy abcz abc: first "c..." of (c, x) and "de" of (de, z) change, then "xy" and "z".
    assert sides == [["oo...", "oooo", "oo..", "oo."], ["ooooo", "oo..", "ooo.", "ooo"]]


def test_nothing_branches():
    assert perturbations(example_trajectories()[:1], 1000) == []


def test_a_vocabulary_too_small_to_tell_branches_apart_changes_nothing():
    assert perturbations([Trajectory.of([0, i, 1]) for i in range(3)], 3) == []


@pytest.mark.parametrize("unit", [64, 256])
def test_synthetic_rollouts_branch_where_it_matters(unit: int):
    rollouts = synthetic_rollouts(97, unit=unit)
    tree = build_prefix_tree(TrajectoryBatch.of(rollouts))
    branching = set(tree.end_S[tree.parent_S[tree.parent_S >= 0]].tolist())
    assert {unit, unit + 1, 2 * unit - 1, 2, 9} <= branching
    assert len({p // unit for p in branching}) < len(branching), "several branches in one chunk"
    assert (tree.multiplicity_S > 1).any()
    words = [tuple(t.token_ids) for t in rollouts]
    assert len(set(words)) < len(words)
    assert any(a != b and a == b[: len(a)] for a in words for b in words)
    assert min(tree.end_S - tree.start_S) == 1
    assert max(len(word) for word in words) >= 3 * unit
