from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.objective import Normalization, loss_weights

NORMALIZATIONS = get_args(Normalization)


def mean_of(trajectories: list[Trajectory], values: list[list[float]], normalization: Normalization) -> float:
    """The mean over a step, from its definition: one token, trajectory and group after the other."""
    token_sums, token_weights, sequence_means, sequence_weights = [], [], [], []
    groups: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for trajectory, row in zip(trajectories, values, strict=True):
        trained = [v for v, m in zip(row, trajectory.loss_mask, strict=True) if m]
        if not trained or trajectory.weight == 0:
            continue
        token_sums.append(trajectory.weight * sum(trained))
        token_weights.append(trajectory.weight * len(trained))
        sequence_means.append(trajectory.weight * sum(trained) / len(trained))
        sequence_weights.append(trajectory.weight)
        groups[trajectory.group_id].append((token_sums[-1], token_weights[-1]))
    if normalization == "token":
        return sum(token_sums) / sum(token_weights)
    if normalization == "sequence":
        return sum(sequence_means) / sum(sequence_weights)
    group_means = [sum(s for s, _ in rows) / sum(w for _, w in rows) for rows in groups.values()]
    return sum(group_means) / len(group_means)


@st.composite
def steps(draw: st.DrawFn) -> list[Trajectory]:
    made = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 6))
        mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        made.append(
            Trajectory.of(
                np.zeros(length, dtype=np.int64),
                loss_mask=mask,
                group_id=draw(st.integers(-1, 2)),
                weight=draw(st.sampled_from([0.0, 0.25, 1.0, 2.0])),
            )
        )
    # At least one counts.
    return [*made, Trajectory.of([1, 2, 3], group_id=7)]


@given(steps(), st.sampled_from(NORMALIZATIONS), st.integers(0, 99))
def test_weighted_sum_is_the_mean_by_definition(trajectories: list[Trajectory], normalization: Normalization, seed):
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(len(t)) for t in trajectories]
    batch = TrajectoryBatch.of(trajectories)
    weight_P = loss_weights(batch, normalization)
    expected = mean_of(trajectories, [v.tolist() for v in values], normalization)
    assert weight_P.dtype == np.float64
    assert float(weight_P @ np.concatenate(values)[batch.trained_P]) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert weight_P.sum() == pytest.approx(1.0, rel=1e-12)


def test_worked_example():
    # Trained tokens: 4, 3, 3, 2.
    first, second = example_trajectories(group_id=1)[:2], example_trajectories(group_id=2)[2:]
    batch = TrajectoryBatch.of([*first, *second])
    lengths = np.repeat([4, 3, 3, 2], [4, 3, 3, 2])
    np.testing.assert_allclose(loss_weights(batch, "token"), 1 / 12, rtol=1e-15)
    np.testing.assert_allclose(loss_weights(batch, "sequence"), 1 / (4 * lengths), rtol=1e-15)
    np.testing.assert_allclose(loss_weights(batch, "group"), np.repeat([1 / 14, 1 / 10], [7, 5]), rtol=1e-15)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_weight_two_counts_as_two_copies(normalization: Normalization):
    one, other, third = example_trajectories()[:3]
    third = replace(third, group_id=1)
    heavy = loss_weights(TrajectoryBatch.of([replace(one, weight=2.0), other, third]), normalization)
    copies = loss_weights(TrajectoryBatch.of([one, one, other, third]), normalization)
    np.testing.assert_allclose(heavy[:4], copies[:4] + copies[4:8], rtol=1e-14)
    np.testing.assert_allclose(heavy[4:], copies[8:], rtol=1e-14)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(
    "idle",
    [Trajectory.of([1, 2], loss_mask=[0, 0], group_id=5), Trajectory.of([1], group_id=5)],
    ids=["masked", "one token"],
)
def test_a_trajectory_without_trained_tokens_counts_for_nothing(normalization: Normalization, idle: Trajectory):
    trained = list(example_trajectories())
    np.testing.assert_array_equal(
        loss_weights(TrajectoryBatch.of([*trained, idle]), normalization),
        loss_weights(TrajectoryBatch.of(trained), normalization),
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_trajectory_of_weight_zero_counts_for_nothing(normalization: Normalization):
    trained = list(example_trajectories())
    weight_P = loss_weights(TrajectoryBatch.of([*trained, Trajectory.of([1, 2], weight=0, group_id=5)]), normalization)
    np.testing.assert_array_equal(weight_P[:-1], loss_weights(TrajectoryBatch.of(trained), normalization))
    assert weight_P[-1] == 0


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_step_without_trained_tokens_is_refused(normalization: Normalization):
    batch = TrajectoryBatch.of([Trajectory.of([1]), Trajectory.of([1, 2], loss_mask=[0, 0])])
    with pytest.raises(ValueError, match=r"2 trajectories without a trained token.*loss_mask"):
        loss_weights(batch, normalization)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_step_of_weight_zero_is_refused(normalization: Normalization):
    batch = TrajectoryBatch.of([Trajectory.of([1, 2], weight=0), Trajectory.of([3], weight=1)])
    with pytest.raises(ValueError, match=r"weight 0 for every trajectory.*positive weight"):
        loss_weights(batch, normalization)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match=r"normalization='batch', expected one of.*'token'"):
        loss_weights(TrajectoryBatch.of(example_trajectories()), "batch")  # type: ignore[arg-type]
