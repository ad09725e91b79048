"""The update by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harts.train.optimizer import make_optimizer, update, warmed_up


def test_the_learning_rate_rises_and_stays():
    rates = [warmed_up(1.0, step=step, warmup_steps=3) for step in range(5)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_without_a_warm_up_the_first_step_is_a_full_one():
    assert warmed_up(0.1, step=0, warmup_steps=0) == 0.1


def test_an_update_reports_the_norm_steps_and_clears():
    module = nn.Linear(2, 1, bias=False)
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer = make_optimizer(module, learning_rate=1.0, weight_decay=0.0)
    assert update(optimizer, learning_rate=0.01, max_grad_norm=1.0) == pytest.approx(5.0)
    # Adam's first step is the learning rate in the direction of the sign.
    torch.testing.assert_close(before - module.weight.detach(), torch.full((1, 2), 0.01), rtol=1e-4, atol=0)
    assert module.weight.grad is None


def test_gradients_are_clipped_before_they_are_used():
    def second_moment(max_grad_norm: float) -> float:
        module = nn.Linear(2, 1, bias=False)
        module.weight.grad = torch.tensor([[30.0, 40.0]])
        optimizer = make_optimizer(module, learning_rate=1.0, weight_decay=0.0)
        update(optimizer, learning_rate=0.01, max_grad_norm=max_grad_norm)
        return float(optimizer.state[module.weight]["exp_avg_sq"].sum())

    assert second_moment(5.0) == pytest.approx(second_moment(50.0) / 100, rel=1e-4)
