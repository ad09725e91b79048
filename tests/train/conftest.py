from __future__ import annotations

import pytest

from harts.config import TrainConfig, load_config

TINY = [
    "model.num_layers=2",
    "model.width=32",
    "rollout.max_turns=2",
    "rollout.num_groups=2",
    "rollout.siblings=2",
    "rollout.max_action_tokens=2",
    "warm_start.steps=3",
    "warm_start.episodes=2",
    "run.steps=5",
    "run.check_every=2",
    "run.checkpoint_every=2",
    "objective.kl_coef=0.01",
    # Untrained, all episodes may earn the same: the entropy's gradient is there even so.
    "objective.entropy_coef=0.01",
]


@pytest.fixture
def tiny_config() -> TrainConfig:
    return load_config(None, TINY)
