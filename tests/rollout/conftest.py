from __future__ import annotations

import random

import pytest

from harts.rollout.environments import TextGame
from harts.rollout.random_play import play_at_random
from harts.rollout.tokenizer import TurnTokenizer


@pytest.fixture(scope="session")
def guess_texts() -> list[str]:
    rng = random.Random(0)
    texts: list[str] = []
    for seed in range(40):
        texts += play_at_random(TextGame("GuessTheNumber-v0-raw", seed=seed), rng)
    return texts


@pytest.fixture(scope="session")
def tokenizer(guess_texts: list[str]) -> TurnTokenizer:
    return TurnTokenizer.build(guess_texts, 1024)
