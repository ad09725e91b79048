"""Random legal play: the texts the tokenizer is built from and the examples of the warm start."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from harts.rollout.environments import TextGame
from harts.rollout.episode import Episode
from harts.rollout.tokenizer import TurnTokenizer


def play_at_random(game: TextGame, rng: random.Random) -> list[str]:
    """Play a game to its end with random legal moves.

    Args:
        game: At its first observation; it is over afterwards.
        rng: Where the moves are drawn from.

    Returns:
        Observations and actions in turn, ending with an action.
    """
    transcript: list[str] = []
    while not game.done:
        action = game.random_legal_action(rng)
        transcript += [game.observation, action]
        game.step(action)
    return transcript


def episode_of(transcript: Sequence[str], tokenizer: TurnTokenizer, *, group_id: int, reward: float) -> Episode:
    """Tokenise a transcript (observations and actions in turn) as the policy would have met and written it."""
    ids: list[int] = []
    begin: list[int] = []
    end: list[int] = []
    for observation, action in zip(transcript[::2], transcript[1::2], strict=True):
        ids += tokenizer.encode_observation(observation)
        begin.append(len(ids))
        ids += tokenizer.encode_action(action)
        end.append(len(ids))
    return Episode(
        token_ids=np.array(ids, dtype=np.int64),
        sampling_logprobs=np.zeros(len(ids)),
        action_begin=np.array(begin, dtype=np.int64),
        action_end=np.array(end, dtype=np.int64),
        group_id=group_id,
        reward=reward,
    )
