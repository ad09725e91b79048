"""What the loss of a step is a mean over, as one weight for each trained token.

Computed over the whole step before it is planned, so any split into microbatches or ranks adds up to the same loss.
The weights of a step add up to 1, so sums of `loss_weight * value` are means.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from harts.data import TrajectoryBatch
from harts.objective.streams import Normalization


def loss_weights(batch: TrajectoryBatch, normalization: Normalization) -> NDArray[np.float64]:
    """The share of each trained token in the loss of its step.

    With the weight `w` and the number of trained tokens `l` of a trajectory, each of its trained tokens gets

    - "token": `w / sum(w * l)`, the mean over all trained tokens of the step (DAPO, arXiv 2503.14476, section 3.3);
    - "sequence": `w / l / sum(w)`, the mean over trajectories of their token means (GRPO, arXiv 2402.03300, eq. 3);
    - "group": `w / sum(w * l, its group) / number of groups`, the mean over groups of their token means.

    Trajectories without trained tokens, and those of weight 0, count for nothing: neither does a group of only those.

    Args:
        batch: All trajectories of the step.
        normalization: One of the three above.

    Returns:
        [P] float64, >= 0, adding up to 1.

    Raises:
        ValueError: If the normalization is unknown, or nothing in the step is trained.

    Example:
        >>> from harts.data import Trajectory
        >>> batch = TrajectoryBatch.of([Trajectory.of([1, 2, 3]), Trajectory.of([1, 2])])
        >>> loss_weights(batch, "sequence").tolist()
        [0.25, 0.25, 0.5]
    """
    count_N = np.bincount(batch.trajectory_P, minlength=batch.weight_N.size)
    return token_shares(batch.weight_N, count_N, batch.group_N, normalization)[batch.trajectory_P]


def token_shares(
    weight_N: NDArray[np.float64], count_N: NDArray[np.int64], group_N: NDArray[np.int64], normalization: Normalization
) -> NDArray[np.float64]:
    """The share of one trained token of each trajectory: what `loss_weights` gives all tokens of a trajectory.

    Args:
        weight_N: [N] float64, >= 0, of all trajectories of the step.
        count_N: [N] int64. Trained tokens of each.
        group_N: [N] int64. Group ids.
        normalization: As for `loss_weights`.

    Returns:
        [N] float64; 0 for trajectories that count for nothing.

    Raises:
        ValueError: As `loss_weights`.
    """
    check_normalization(normalization)
    active_N = (count_N > 0) & (weight_N > 0)
    if not active_N.any():
        raise ValueError(_nothing_trained(count_N))
    weight_N = np.where(active_N, weight_N, 0.0)
    if normalization == "sequence":
        return weight_N / np.maximum(count_N, 1) / weight_N.sum()
    if normalization == "token":
        return weight_N / (weight_N * count_N).sum()
    return _group_shares(weight_N, count_N, group_N)


def check_normalization(normalization: str) -> None:
    """Raise a ValueError if there is no such normalization."""
    if normalization not in get_args(Normalization):
        raise ValueError(f"Got normalization={normalization!r}, expected one of {get_args(Normalization)}.")


def _group_shares(
    weight_N: NDArray[np.float64], count_N: NDArray[np.int64], group_N: NDArray[np.int64]
) -> NDArray[np.float64]:
    active_N = weight_N > 0
    _, group_of_active = np.unique(group_N[active_N], return_inverse=True)
    tokens_by_group = np.bincount(group_of_active, weights=(weight_N * count_N)[active_N])
    share_N = np.zeros_like(weight_N)
    share_N[active_N] = weight_N[active_N] / tokens_by_group[group_of_active] / tokens_by_group.size
    return share_N


def _nothing_trained(count_N: NDArray[np.int64]) -> str:
    if not count_N.any():
        return (
            f"Got {count_N.size} trajectories without a trained token, expected at least one. "
            "Set loss_mask where the policy wrote the token, or skip the step."
        )
    return (
        f"Got weight 0 for every trajectory with trained tokens ({count_N.size} in all), expected one above 0. "
        "Give the trajectories that should count a positive weight, or skip the step."
    )
