"""The update: AdamW after a norm clip, with a linear warm-up."""

from __future__ import annotations

import torch
from torch import nn


def make_optimizer(module: nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over all parameters.

    Args:
        module: What is trained.
        learning_rate: > 0, after the warm-up.
        weight_decay: >= 0, decoupled.
    """
    return torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=weight_decay, betas=(0.9, 0.95))


def update(optimizer: torch.optim.AdamW, *, learning_rate: float, max_grad_norm: float) -> float:
    """Apply the gradients that lie in `.grad`, then clear them.

    Args:
        optimizer: Holds the parameters.
        learning_rate: > 0, for this update.
        max_grad_norm: > 0; gradients of a larger norm are scaled down to it.

    Returns:
        The norm of the gradients before the clip.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def warmed_up(learning_rate: float, *, step: int, warmup_steps: int) -> float:
    """The learning rate of a step (from 0): it rises linearly over the warm-up and then stays."""
    return learning_rate * min(1.0, (step + 1) / (warmup_steps + 1))
