"""The comparison measures what it says, and sees a wrong gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import harts.train.comparison
from harts.config import ModelConfig
from harts.data.trajectory import example_trajectories
from harts.models import prepare
from harts.objective import grpo
from harts.step import train_step
from harts.train.comparison import compare_executions
from harts.train.policy import random_policy

LIMIT = 1000


@pytest.fixture
def prepared():
    return prepare(random_policy(ModelConfig(num_layers=2, width=32), vocab_size=8, seed=0))


@pytest.fixture
def trajectories():
    return [
        dataclasses.replace(t, advantages=t.advantages + i - 1.5, sampling_logprobs=t.advantages * 0 - 2.0)
        for i, t in enumerate(example_trajectories())
    ]


@pytest.mark.parametrize("first", ["tree", "flat"])
def test_the_tree_gradients_are_left_and_both_agree(prepared, trajectories, first):
    comparison = compare_executions(prepared, trajectories, grpo(), max_tokens_per_microbatch=LIMIT, first=first)
    left = [parameter.grad.clone() for parameter in prepared.module.parameters()]
    prepared.module.zero_grad()
    train_step(prepared, trajectories, grpo(), max_tokens_per_microbatch=LIMIT)
    assert all(torch.equal(a, p.grad) for a, p in zip(left, prepared.module.parameters(), strict=True))
    assert comparison.max_logprob_diff < 1e-5
    assert comparison.max_grad_rel_diff < 1e-3
    assert (comparison.tree.num_tokens_distinct, comparison.flat.num_tokens_distinct) == (8, 16)


def test_gradients_of_nothing_are_not_compared(prepared, trajectories):
    equal = [dataclasses.replace(t, advantages=t.advantages * 0) for t in trajectories]
    comparison = compare_executions(prepared, equal, grpo(), max_tokens_per_microbatch=LIMIT)
    assert comparison.max_grad_rel_diff is None
    assert comparison.max_logprob_diff < 1e-5


def test_a_wrong_tree_step_is_seen(prepared, trajectories, monkeypatch):
    def wrong(model, trajectories, objective, *, execution, max_tokens_per_microbatch):
        if execution == "tree":
            trajectories = [*trajectories[:-1], dataclasses.replace(trajectories[-1], weight=0.5)]
        return train_step(
            model, trajectories, objective, execution=execution, max_tokens_per_microbatch=max_tokens_per_microbatch
        )

    monkeypatch.setattr(harts.train.comparison, "train_step", wrong)
    comparison = compare_executions(prepared, trajectories, grpo(), max_tokens_per_microbatch=LIMIT)
    assert comparison.max_grad_rel_diff > 1e-2
