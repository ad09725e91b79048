"""What the routers of an unmodified transformers model do with each trajectory alone; for tests of routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import harts
from harts.data import Trajectory
from harts.layers.moe import reference
from harts.models.registry import family_of_type, find_family, supported_types
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


@contextmanager
def routers_kept(model: PreTrainedModel) -> Iterator[Alone]:
    """What the routers give, with gradients, of every trajectory that is run alone in here; filled at the end."""
    routers = family_of_type(model.config.model_type)[1].routers
    kept: list[tuple[Tensor, Tensor]] = []
    alone: Alone = []

    def keep(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        first, _, last = output
        kept.append((first, last) if first.is_floating_point() else (last, first))

    handles = [m.register_forward_hook(keep) for m in model.modules() if type(m).__name__ in routers]
    yield alone
    for handle in handles:
        handle.remove()
    alone.extend(kept[i : i + len(handles)] for i in range(0, len(kept), len(handles)))


def route_alone(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> Alone:
    """Run every trajectory alone and keep what its routers gave."""
    with routers_kept(model) as alone, torch.no_grad():
        for trajectory in trajectories:
            model(torch.from_numpy(trajectory.token_ids)[None], use_cache=False)
    return alone


def reference_losses(
    model: PreTrainedModel,
    alone: Alone,
    losses: harts.RouterLosses,
    *,
    counts: Sequence[float],
    microbatches: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Balance loss and z-loss of a step by definition, before their coefficients; `counts` are of trajectories."""
    (kind,) = family_of_type(model.config.model_type)[1].routers.values()
    balance = torch.zeros(())
    if losses.balance is not None:
        split = [[alone[i] for i in m] for m in microbatches]
        split_counts = [[counts[i] for i in m] for m in microbatches]
        balance = reference.balance_loss(split, split_counts, losses.balance, kind.scores)
    return balance, reference.z_loss(alone, counts)


def follow_routes(exact: harts.TreeModel, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories with the routes of a model in a wider dtype.

    In 16 bits near-ties send tokens to other experts, in flat training as on trees; which of the two a few of these hit
    harder is chance and would decide a comparison of errors.
    """
    family = find_family(exact.module.config)
    if family.active_experts(exact.module.config) < 1 and not exact.routing.sites:
        pytest.skip("this transformers routes inside the block, so routes cannot be given")
    if not exact.routing.sites:
        return list(trajectories)
    routes = harts.record_routes(exact, trajectories)
    return [replace(t, routes=r) for t, r in zip(trajectories, routes, strict=True)]
