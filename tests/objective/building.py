"""Streams for objectives, built from trajectories and made-up log-probs, as a step would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.data import Trajectory, TrajectoryBatch
from harts.objective import Normalization, PolicyStreams, loss_weights


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A step: its batch, and log-probs and entropies as the model would give them."""

    batch: TrajectoryBatch
    logprobs_P: Tensor
    entropy_P: Tensor

    @property
    def num_trajectories(self) -> int:
        return self.batch.weight_N.size

    def streams(
        self,
        normalization: Normalization,
        *,
        only: Sequence[int] | None = None,
        logprobs_P: Tensor | None = None,
        entropy_P: Tensor | None = None,
    ) -> PolicyStreams:
        """The streams of a microbatch of the trajectories `only`, under the loss weights of the whole step."""
        chosen = np.arange(self.num_trajectories) if only is None else np.asarray(only, dtype=np.int64)
        batch = self.batch
        tokens = batch.policy_tokens(chosen)
        place_N = np.full(self.num_trajectories, -1)
        place_N[chosen] = np.arange(chosen.size)
        assert batch.sampling_logprobs_P is not None
        assert batch.ref_logprobs_P is not None
        return PolicyStreams(
            logprobs_P=(self.logprobs_P if logprobs_P is None else logprobs_P)[tokens],
            entropy_P=(self.entropy_P if entropy_P is None else entropy_P)[tokens],
            sampling_logprobs_P=torch.from_numpy(batch.sampling_logprobs_P[tokens]),
            ref_logprobs_P=torch.from_numpy(batch.ref_logprobs_P[tokens]),
            advantages_P=torch.from_numpy(batch.advantages_P[tokens]),
            loss_weight_P=torch.from_numpy(loss_weights(batch, normalization)[tokens]),
            trajectory_P=torch.from_numpy(place_N[batch.trajectory_P[tokens]]),
            num_trajectories=chosen.size,
        )


def sample(trajectories: Sequence[Trajectory], *, seed: int = 0, distance: float = 0.4) -> Sample:
    """A step whose policy has moved: each log-prob lies about `distance` from that of the sampling policy."""
    batch = TrajectoryBatch.of(trajectories)
    assert batch.sampling_logprobs_P is not None
    rng = np.random.default_rng(seed)
    size = batch.trained_P.size
    moved = batch.sampling_logprobs_P + distance * rng.standard_normal(size)
    return Sample(
        batch=batch,
        logprobs_P=torch.from_numpy(moved).requires_grad_(),
        entropy_P=torch.from_numpy(rng.uniform(0.1, 2.0, size)).requires_grad_(),
    )


def rollouts(seed: int = 0, *, lengths: Sequence[int] = (5, 4, 4, 3, 1, 6), spread: bool = False) -> list[Trajectory]:
    """Trajectories of several lengths, weights and groups; the fifth is masked entirely.

    Args:
        seed: Of everything random.
        lengths: Tokens of each.
        spread: Give each token an advantage of its own instead of one for the trajectory.
    """
    rng = np.random.default_rng(seed)
    made = []
    for i, length in enumerate(lengths):
        mask = rng.random(length) < 0.8
        mask[-1], mask[0] = True, False
        made.append(
            Trajectory.of(
                rng.integers(0, 9, length),
                loss_mask=mask,
                advantages=rng.standard_normal(length) if spread else rng.standard_normal(),
                sampling_logprobs=-rng.uniform(0.1, 3.0, length),
                ref_logprobs=-rng.uniform(0.1, 3.0, length),
                group_id=i // 2,
                weight=(1.0, 2.0, 0.5, 1.0, 1.0, 0.0)[i % 6],
            )
        )
    return made
