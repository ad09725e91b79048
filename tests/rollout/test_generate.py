"""Generation in lockstep: what each episode records is what the model says about that episode alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from harts.rollout.environments import TextGame
from harts.rollout.generate import SamplingSettings, play_with_model

GUESS, HANOI = "GuessTheNumber-v0-raw", "TowerOfHanoi-v0-raw"
# Warm enough that actions differ, and errors tolerated so that episodes last.
SETTINGS = SamplingSettings(temperature=1.5, max_action_tokens=4)


@pytest.fixture(scope="module")
def model(tokenizer) -> PreTrainedModel:
    config = Qwen3_5TextConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3_5ForCausalLM(config).eval()
        # Make guesses and ends of actions likely, so that episodes take different courses.
        guesses = [tokenizer.encode_action(f"[{n}]")[0] for n in range(1, 21)]
        with torch.no_grad():
            model.lm_head.weight.mul_(0.2)
            model.lm_head.weight[guesses] *= 12
            model.lm_head.weight[tokenizer.end_id] *= 20
    return model


def guess(seed: int) -> TextGame:
    return TextGame(GUESS, seed=seed, max_turns=3, tolerated_errors=2)


def play(model, tokenizer, *, games=None, settings=SETTINGS, seed=0):
    games = games or [(group, guess(group)) for group in range(3) for _ in range(4)]
    return play_with_model(model, tokenizer, games, settings=settings, generator=torch.Generator().manual_seed(seed))


def assert_logprobs_are_the_models(model, episode, temperature):
    with torch.no_grad():
        logits_LW = model(torch.from_numpy(episode.token_ids)[None], use_cache=False).logits[0]
    logprobs_LW = torch.log_softmax(logits_LW / temperature, dim=-1)
    sampled = np.zeros(episode.token_ids.size, dtype=bool)
    for begin, end in zip(episode.action_begin, episode.action_end, strict=True):
        sampled[begin:end] = True
    expected = np.zeros(episode.token_ids.size)
    for t in np.flatnonzero(sampled):
        expected[t] = logprobs_LW[t - 1, episode.token_ids[t]]
    np.testing.assert_allclose(episode.sampling_logprobs, expected, atol=2e-4)


def test_sampling_logprobs_are_those_of_each_episode_alone(model, tokenizer):
    episodes = play(model, tokenizer)
    assert len({episode.token_ids.size for episode in episodes}) > 2, "the case needs rows that end apart"
    for episode in episodes:
        assert_logprobs_are_the_models(model, episode, SETTINGS.temperature)


def test_games_with_different_prompts_share_only_what_is_equal(model, tokenizer):
    games = [(0, guess(0)), (1, TextGame(HANOI, seed=0, max_turns=2))]
    for episode in play(model, tokenizer, games=games):
        assert_logprobs_are_the_models(model, episode, SETTINGS.temperature)


def test_an_equal_generator_gives_equal_episodes(model, tokenizer):
    first, second = play(model, tokenizer, seed=3), play(model, tokenizer, seed=3)
    assert [e.token_ids.tolist() for e in first] == [e.token_ids.tolist() for e in second]
    other = play(model, tokenizer, seed=4)
    assert [e.token_ids.tolist() for e in first] != [e.token_ids.tolist() for e in other]


def test_an_episode_is_its_observations_and_actions_in_turn(model, tokenizer):
    for episode in play(model, tokenizer):
        ids, position = episode.token_ids.tolist(), 0
        game = guess(episode.group_id)
        for begin, end in zip(episode.action_begin, episode.action_end, strict=True):
            assert ids[position:begin] == tokenizer.encode_observation(game.observation)
            assert 1 <= end - begin <= SETTINGS.max_action_tokens
            assert ids[end - 1] == tokenizer.end_id or end - begin == SETTINGS.max_action_tokens
            game.step(tokenizer.decode(ids[begin:end]) if ids[end - 1] == tokenizer.end_id else "")
            position = end
        assert position == len(ids)
        assert game.done
        assert game.reward == episode.reward


def test_forks_share_what_was_before_and_part_after(model, tokenizer):
    settings = SamplingSettings(temperature=1.5, max_action_tokens=4, branch_at=1)
    games = [(group, guess(group)) for group in range(6)]
    episodes = play(model, tokenizer, games=games, settings=settings)
    parted = 0
    for group in range(6):
        of_group = [episode for episode in episodes if episode.group_id == group]
        ended_before = any(episode.num_turns == 1 for episode in of_group)
        assert len(of_group) == (1 if ended_before else 2)
        for episode in of_group:
            assert_logprobs_are_the_models(model, episode, settings.temperature)
        if len(of_group) == 2:
            end = of_group[0].action_end[0]
            np.testing.assert_array_equal(of_group[0].token_ids[:end], of_group[1].token_ids[:end])
            parted += of_group[0].token_ids.tolist() != of_group[1].token_ids.tolist()
    assert parted > 0


def test_an_action_without_an_end_is_no_move(model, tokenizer):
    """Or the policy could write anything after a complete move at no cost."""
    settings = SamplingSettings(temperature=1.5, max_action_tokens=1)
    games = [(n, TextGame(GUESS, seed=n, tolerated_errors=0)) for n in range(20)]
    episodes = play(model, tokenizer, games=games, settings=settings)
    guesses = {tokenizer.encode_action(f"[{n}]")[0] for n in range(1, 21)}
    assert any(episode.token_ids[-1] in guesses for episode in episodes), "the case needs a move that lacks its end"
    assert {(episode.num_turns, episode.reward) for episode in episodes} == {(1, 0.0)}


def test_generation_leaves_no_gradient_graph(model, tokenizer):
    play(model, tokenizer)
    assert all(parameter.grad is None for parameter in model.parameters())
