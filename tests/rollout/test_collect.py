"""Trajectories of calls, and how siblings are compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.rollout.collect import group_advantages, trajectories_of
from harts.rollout.episode import Episode
from harts.rollout.random_play import episode_of


def two_turns(**fields) -> Episode:
    return Episode(
        **{
            "token_ids": np.array([1, 2, 3, 4, 5, 6, 7]),
            "sampling_logprobs": np.array([0, 0, -0.3, -0.4, 0, -0.6, -0.7]),
            "action_begin": np.array([2, 5]),
            "action_end": np.array([4, 7]),
            "group_id": 9,
            "reward": 1.0,
            **fields,
        }
    )


def test_each_call_is_its_context_and_its_action():
    first, second = trajectories_of([two_turns()], np.array([0.5]), temperature=0.8)
    assert first.token_ids.tolist() == [1, 2, 3, 4]
    assert first.loss_mask.tolist() == [False, False, True, True]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert second.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert second.sampling_logprobs is not None
    assert second.sampling_logprobs[second.loss_mask].tolist() == [-0.6, -0.7]
    assert {first.group_id, second.group_id} == {9}
    assert {first.temperature, second.temperature} == {0.8}
    assert first.advantages[2] == second.advantages[5] == 0.5


def test_every_sampled_token_is_trained_once():
    episodes = [two_turns(), two_turns(reward=0.0)]
    trajectories = trajectories_of(episodes, np.array([1.0, -1.0]), temperature=1.0)
    assert sum(t.loss_mask.sum() for t in trajectories) == 8


def test_advantages_by_hand():
    rewards, groups = np.array([1.0, 0.0, 0.5, 1.0]), np.array([7, 7, 3, 3])
    plain = group_advantages(rewards, groups, scale_by_std=False)
    np.testing.assert_allclose(plain, [0.5, -0.5, -0.25, 0.25])
    scaled = group_advantages(rewards, groups, scale_by_std=True)
    np.testing.assert_allclose(scaled, [1, -1, -1, 1], rtol=1e-3)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=30),
    st.booleans(),
)
def test_advantages_sum_to_nothing_in_every_group(episodes, scale):
    rewards, groups = (np.array(column) for column in zip(*episodes, strict=True))
    advantages = group_advantages(rewards, groups, scale_by_std=scale)
    for group in np.unique(groups):
        assert abs(advantages[groups == group].sum()) < 1e-6


def test_equal_rewards_teach_nothing():
    advantages = group_advantages(np.full(4, 0.7), np.zeros(4, dtype=int), scale_by_std=True)
    np.testing.assert_allclose(advantages, 0, atol=1e-9)


def test_a_transcript_becomes_the_ids_a_policy_would_have_met(tokenizer):
    episode = episode_of(["start", "[3]", "higher", "[5]"], tokenizer, group_id=2, reward=0.4)
    expected = [
        *tokenizer.encode_observation("start"),
        *tokenizer.encode_action("[3]"),
        *tokenizer.encode_observation("higher"),
        *tokenizer.encode_action("[5]"),
    ]
    assert episode.token_ids.tolist() == expected
    actions = [
        tokenizer.decode(expected[begin:end])
        for begin, end in zip(episode.action_begin, episode.action_end, strict=True)
    ]
    assert actions == ["[3]", "[5]"]
    assert (episode.group_id, episode.reward, episode.num_turns) == (2, pytest.approx(0.4), 2)
