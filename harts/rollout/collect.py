"""Episodes in, one `Trajectory` for every call of the policy out.

A call is trained on its own action only, in the context it was made in. The calls of an episode begin with each
other and siblings begin with the same prompt, so a step's trajectories form deep trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory
from harts.rollout.episode import Episode

STD_EPSILON = 1e-4


def group_advantages(
    reward_N: NDArray[np.float64], group_N: NDArray[np.int64], *, scale_by_std: bool
) -> NDArray[np.float64]:
    """How much better each episode did than its siblings.

    The group-relative advantage of GRPO (DeepSeekMath, section 4.1); without the division by the standard deviation it
    is that of Dr. GRPO.

    Args:
        reward_N: [N] float64.
        group_N: [N] int64, group of each episode.
        scale_by_std: Whether to divide by the group's standard deviation.

    Returns:
        [N] float64, with mean 0 over each group; all 0 in a group of equal rewards.
    """
    _, place_N = np.unique(group_N, return_inverse=True)
    count_G = np.bincount(place_N)
    advantage_N = reward_N - (np.bincount(place_N, reward_N) / count_G)[place_N]
    if scale_by_std:
        std_G = np.sqrt(np.bincount(place_N, advantage_N**2) / count_G)
        advantage_N = advantage_N / (std_G[place_N] + STD_EPSILON)
    return advantage_N


def trajectories_of(
    episodes: Sequence[Episode], advantage_N: NDArray[np.float64], *, temperature: float
) -> list[Trajectory]:
    """One trajectory a call, all calls of an episode with the episode's advantage.

    Args:
        episodes: [N] at least one.
        advantage_N: [N] float64, finite.
        temperature: > 0, of the sampling.

    Returns:
        Trajectories with sampling log-probs, episode after episode, turn after turn.
    """
    return [
        _call(episode, turn, advantage=float(advantage), temperature=temperature)
        for episode, advantage in zip(episodes, advantage_N, strict=True)
        for turn in range(episode.num_turns)
    ]


def _call(episode: Episode, turn: int, *, advantage: float, temperature: float) -> Trajectory:
    end = episode.action_end[turn]
    return Trajectory.of(
        episode.token_ids[:end],
        loss_mask=np.arange(end) >= episode.action_begin[turn],
        advantages=advantage,
        sampling_logprobs=episode.sampling_logprobs[:end],
        group_id=episode.group_id,
        temperature=temperature,
    )
