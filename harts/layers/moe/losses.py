"""Load-balancing losses and the router z-loss over the trajectories of a step, from the rows of one microbatch.

All losses are linear in the probabilities once it is counted which experts were chosen, so that a layer's gradient
needs nothing of other layers but their counts. `reference.py` has the definitions, trajectory by trajectory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from harts.layers.moe.statistics import RouterStatistics
from harts.layout.paths import TokenPaths

Balance = Literal["microbatch", "layer", "sequence", "step"]
FORMS = ("microbatch", "layer", "sequence", "step")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterLosses:
    """What a step adds to the objective for the sake of the routers, and counts of them. docs/moe.md defines each.

    Example:
        >>> RouterLosses(balance="sequence", balance_coef=1e-4, z_coef=1e-3).has_losses
        True
    """

    balance: Balance | None = None
    """Which load-balancing loss: "microbatch" (transformers': all layers and all tokens of a microbatch together),
    "layer" (Switch: each layer on its own), "sequence" (DeepSeek-V3: each layer and trajectory on its own), "step"
    (each layer over the whole step). None for none."""
    balance_coef: float = 0.0
    """>= 0. What the load-balancing loss is multiplied by."""
    z_coef: float = 0.0
    """>= 0. What the router z-loss is multiplied by."""
    count_weights: bool = False
    """Whether a trajectory counts as often as its weight says, in losses and in statistics. False counts each once."""
    load: RouterStatistics | None = None
    """For "step": the loads of the whole step, of all ranks (see `harts.count_load`). None counts them first, in a
    pass without gradients, which one rank alone can do."""

    def __post_init__(self) -> None:
        if self.balance is not None and self.balance not in FORMS:
            raise ValueError(f"balance is {self.balance!r}, expected one of {', '.join(FORMS)}, or None.")
        for name, value in (("balance_coef", self.balance_coef), ("z_coef", self.z_coef)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}, expected a finite number >= 0. Choose 0 to leave the loss out.")
        if self.balance is None and self.balance_coef > 0:
            raise ValueError(f"balance_coef is {self.balance_coef} without a balance. Name one of {', '.join(FORMS)}.")
        if self.load is not None and self.balance != "step":
            raise ValueError(f'Got loads with balance {self.balance!r}; only "step" reads them. Leave them out.')

    @property
    def has_losses(self) -> bool:
        """Whether anything is added to the objective."""
        return self.balance_coef > 0 or self.z_coef > 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepShare:
    """The microbatch's trajectories and what they are a part of."""

    paths: TokenPaths
    """Of the microbatch."""
    count_N: Tensor
    """[N] float64. How often each of its trajectories counts."""
    count_T: Tensor
    """[T] float64. How often each row counts: the sum over the trajectories that contain it; 0 for padding."""
    num_tokens: float
    """Tokens of the microbatch's trajectories, as often as they count."""
    num_step_tokens: float
    """Tokens of the step's."""
    num_step_trajectories: float
    """Trajectories of the step, as often as they count."""

    @classmethod
    def of(
        cls, paths: TokenPaths, *, count_weights: bool, num_step_tokens: float, num_step_trajectories: float
    ) -> StepShare:
        """Count the rows of a layout; the step's numbers are of all microbatches and ranks."""
        counts = paths.weight_N if count_weights else np.ones_like(paths.weight_N)
        count_N = torch.from_numpy(counts).to(paths.tail_N.device)
        return cls(
            paths=paths,
            count_N=count_N,
            count_T=paths.spread(count_N[:, None])[:, 0],
            num_tokens=float((counts * paths.length_N).sum()),
            num_step_tokens=num_step_tokens,
            num_step_trajectories=num_step_trajectories,
        )


def selected(expert_TA: Tensor, num_experts: int) -> Tensor:
    """[T, X] float64, 1 where an expert was chosen."""
    chosen_TX = torch.zeros(expert_TA.shape[0], num_experts, dtype=torch.float64, device=expert_TA.device)
    return chosen_TX.scatter_(1, expert_TA, 1.0)


def sequence_frequency(chosen_TX: Tensor, num_active: int, share: StepShare) -> Tensor:
    """`f` of DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equation 18), times the trajectory's part in the mean.

    Args:
        chosen_TX: [T, X], see `selected`.
        num_active: A.
        share: The microbatch.

    Returns:
        [N, X] float64. What the loss multiplies a sum of probabilities along a trajectory by.
    """
    length_N = torch.from_numpy(share.paths.length_N).to(chosen_TX)
    frequency_NX = share.paths.sum_along(chosen_TX) * (chosen_TX.shape[1] / num_active) / length_N[:, None]
    return frequency_NX * (share.count_N / length_N)[:, None] / share.num_step_trajectories


def step_frequency(load_MX: Tensor, num_active: int, num_tokens: float, *, balance: Balance) -> Tensor:
    """`f` of the losses over all tokens of a microbatch or a step.

    Args:
        load_MX: [M, X] float64. Of the tokens that the loss is over.
        num_active: A.
        num_tokens: That were counted.
        balance: "microbatch" joins the layers and, like transformers, does not divide by A.

    Returns:
        [M, X] float64. What the loss multiplies mean probabilities by.
    """
    num_experts = load_MX.shape[1]
    if num_tokens == 0:  # trajectories of weight 0 alone, which nothing is added for
        return torch.zeros_like(load_MX)
    if balance == "microbatch":
        return load_MX.mean(0).expand_as(load_MX) * num_experts / num_tokens
    return load_MX * (num_experts / num_active) / num_tokens


def squared_logsumexp(logits_TX: Tensor) -> Tensor:
    """[T]. What the router z-loss averages (ST-MoE, arXiv 2202.08906, equation 5)."""
    return logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32)).logsumexp(-1).square()


def z_gradient(logits_TX: Tensor) -> Tensor:
    """[T, X]. Gradient of `squared_logsumexp` at each row's logits."""
    logits_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    return 2 * logits_TX.logsumexp(-1, keepdim=True) * logits_TX.softmax(-1)
