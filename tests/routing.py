"""What the routers of an unmodified transformers model do with each trajectory alone; for tests of routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import harts
from harts.data import Trajectory
from harts.layers.moe import reference
from harts.models.registry import family_of_type, supported_types
from harts.models.tiny import tiny_model

Alone = list[list[tuple[Tensor, Tensor]]]
"""Trajectory, layer: logits [L, X] and experts [L, A]."""


def _shows_routers(model_type: str) -> bool:
    routers = family_of_type(model_type)[1].routers
    return any(type(m).__name__ in routers for m in tiny_model(model_type).modules())


MOE_TYPES = [name for name in supported_types() if _shows_routers(name)]


def tiny_moe(
    model_type: str, *, dtype: torch.dtype = torch.float64, overrides: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A tiny model whose correction biases matter."""
    model = tiny_model(model_type, dtype=dtype, overrides=overrides)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def route_alone(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> Alone:
    """Run every trajectory alone and keep what its routers gave, with gradients."""
    routers = family_of_type(model.config.model_type)[1].routers
    current: list[tuple[Tensor, Tensor]] = []

    def keep(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        first, _, last = output
        current.append((first, last) if first.is_floating_point() else (last, first))

    handles = [m.register_forward_hook(keep) for m in model.modules() if type(m).__name__ in routers]
    alone = []
    for trajectory in trajectories:
        model(torch.from_numpy(trajectory.token_ids)[None], use_cache=False)
        alone.append(list(current))
        current.clear()
    for handle in handles:
        handle.remove()
    return alone


def reference_losses(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    losses: harts.RouterLosses,
    microbatches: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Balance loss, z-loss and loads of a step by definition; gradients of the losses are added to the model."""
    (kind,) = family_of_type(model.config.model_type)[1].routers.values()
    alone = route_alone(model, trajectories)
    counts = [t.weight if losses.count_weights else 1.0 for t in trajectories]
    z = reference.z_loss(alone, counts)
    balance = torch.zeros(())
    if losses.balance is not None:
        split = [[alone[i] for i in m] for m in microbatches]
        split_counts = [[counts[i] for i in m] for m in microbatches]
        balance = reference.balance_loss(split, split_counts, losses.balance, kind.scores)
    total = losses.balance_coef * balance + losses.z_coef * z
    if losses.has_losses:
        total.backward()
    return balance.detach(), z.detach(), reference.loads(alone, counts)
