"""Routers of one microbatch: count what they chose, add the auxiliary losses' gradients, hand out given routes.

The gradient is injected behind the combine weights: their gradient passes as it is, and the logits receive that of
the auxiliary losses besides. It is computed when backward arrives, when every layer has been counted; the model's own
outputs need not carry logits, and a forward that activation checkpointing repeats counts nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.layers.moe.losses import (
    RouterLosses,
    StepShare,
    selected,
    sequence_frequency,
    squared_logsumexp,
    step_frequency,
    z_gradient,
)
from harts.layers.moe.scores import Scores, logit_gradient, probabilities
from harts.layers.moe.statistics import RouterStatistics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LayerRecord:
    load_X: Tensor
    probability_X: Tensor
    """Sum over the tokens of their probabilities."""
    z: Tensor
    """Sum over the tokens of their squared log-sum-exp."""
    frequency_NX: Tensor | None
    """For the sequence-wise loss, see `sequence_frequency`."""
    sequence_loss: Tensor | None
    num_active: int
    expert_TA: Tensor | None
    """If choices are kept."""


class RouterRecorder:
    """What a model's routers do in one microbatch; made anew for each."""

    def __init__(
        self,
        layers: tuple[str, ...],
        losses: RouterLosses,
        *,
        share: StepShare,
        given_TMA: Tensor | None = None,
        keep_choices: bool = False,
    ) -> None:
        """Start with nothing counted.

        Args:
            layers: Names of the routers, in the order in which the model calls them.
            losses: What to add to the objective.
            share: The microbatch and its step.
            given_TMA: [T, M, A] int. Experts to take instead of the routers' own choice; a token and layer whose
                entries are negative is left to the router. None leaves all to the routers.
            keep_choices: Whether `choices` is asked for.
        """
        self.layers = layers
        self._losses = losses
        self._share = share
        self._given_TMA = given_TMA
        self._keep_choices = keep_choices
        self._records: dict[int, _LayerRecord] = {}
        self._frequency_MX: Tensor | None = None

    def given(self, layer: int) -> Tensor | None:
        """[T, A] int64. Experts given for a layer, negative where the router chooses; None without given routes."""
        return None if self._given_TMA is None else self._given_TMA[:, layer].long()

    def record(self, layer: int, scores: Scores, logits_TX: Tensor, weight_TA: Tensor, expert_TA: Tensor) -> Tensor:
        """Count a layer's choices, once, and add the auxiliary losses' gradient.

        Args:
            layer: Place of the router in `layers`.
            scores: Kind of its probabilities.
            logits_TX: [T, X].
            weight_TA: [T, A]. Combine weights.
            expert_TA: [T, A] int64. Chosen experts.

        Returns:
            `weight_TA`, unchanged, from where the gradient is injected.
        """
        if layer not in self._records:
            with torch.no_grad():
                self._records[layer] = self._layer_record(scores, logits_TX, expert_TA)
        if not self._losses.has_losses:
            return weight_TA
        return _InjectGradient.apply(weight_TA, logits_TX, _At(recorder=self, layer=layer, scores=scores))

    def statistics(self) -> RouterStatistics:
        """What was counted, when the microbatch is over.

        Raises:
            ValueError: If a router was never called.
        """
        self._check_complete()
        share, records = self._share, self._all_records()
        load_MX = torch.stack([r.load_X for r in records])
        z = sum(r.z.item() for r in records) / (share.num_step_tokens * len(records))
        return RouterStatistics(
            layers=self.layers,
            load_MX=load_MX.cpu().numpy(),
            num_tokens=share.num_tokens,
            balance_loss=self._balance_loss(records),
            z_loss=z,
        )

    def choices(self) -> np.ndarray:
        """[T, M, A] int64. The experts that every row went to."""
        self._check_complete()
        kept = [r.expert_TA for r in self._all_records()]
        assert self._keep_choices
        return torch.stack([expert_TA for expert_TA in kept if expert_TA is not None], dim=1).cpu().numpy()

    def logit_gradient(self, layer: int, scores: Scores, logits_TX: Tensor) -> Tensor:
        """[T, X]. Gradient of the step's auxiliary losses, coefficients included, at a layer's logits."""
        losses, share = self._losses, self._share
        compute = torch.promote_types(logits_TX.dtype, torch.float32)
        mean = 1 / (share.num_step_tokens * len(self.layers))
        gradient_TX = torch.zeros_like(logits_TX, dtype=compute)
        if losses.balance_coef > 0:
            frequency_NX = self._records[layer].frequency_NX
            if frequency_NX is not None:
                slope_TX = share.paths.spread(frequency_NX) / len(self.layers)
            else:
                slope_TX = self._frequency()[layer] * share.count_T[:, None] * mean
            slope_TX = (losses.balance_coef * slope_TX).to(compute)
            gradient_TX += logit_gradient(logits_TX, slope_TX, scores)
        if losses.z_coef > 0:
            gradient_TX += (losses.z_coef * mean * share.count_T[:, None]).to(compute) * z_gradient(logits_TX)
        return gradient_TX.to(logits_TX.dtype)

    def _layer_record(self, scores: Scores, logits_TX: Tensor, expert_TA: Tensor) -> _LayerRecord:
        share, num_active = self._share, expert_TA.shape[1]
        chosen_TX = selected(expert_TA, logits_TX.shape[1])
        probability_TX = probabilities(logits_TX, scores).double()
        frequency_NX, sequence_loss = None, None
        if self._losses.balance == "sequence":
            frequency_NX = sequence_frequency(chosen_TX, num_active, share)
            sequence_loss = (frequency_NX * share.paths.sum_along(probability_TX)).sum() / len(self.layers)
        return _LayerRecord(
            load_X=share.count_T @ chosen_TX,
            probability_X=share.count_T @ probability_TX,
            z=share.count_T @ squared_logsumexp(logits_TX).double(),
            frequency_NX=frequency_NX,
            sequence_loss=sequence_loss,
            num_active=num_active,
            expert_TA=expert_TA if self._keep_choices else None,
        )

    def _balance_loss(self, records: list[_LayerRecord]) -> float:
        if self._losses.balance is None:
            return 0.0
        if self._losses.balance == "sequence":
            return sum(r.sequence_loss.item() for r in records if r.sequence_loss is not None)
        mean_MX = torch.stack([r.probability_X for r in records]) / self._share.num_step_tokens
        return ((self._frequency() * mean_MX).sum() / len(records)).item()

    def _frequency(self) -> Tensor:
        """[M, X], of all layers, when all have been counted."""
        if self._frequency_MX is None:
            self._check_complete()
            losses, records = self._losses, self._all_records()
            assert losses.balance is not None
            load_MX, num_tokens = torch.stack([r.load_X for r in records]), self._share.num_tokens
            if losses.balance == "step":
                assert losses.load is not None, "counted before the first microbatch"
                load_MX = torch.from_numpy(losses.load.load_MX).to(load_MX)
                num_tokens = losses.load.num_tokens
            self._frequency_MX = step_frequency(load_MX, records[0].num_active, num_tokens, balance=losses.balance)
        return self._frequency_MX

    def _all_records(self) -> list[_LayerRecord]:
        return [self._records[layer] for layer in range(len(self.layers))]

    def _check_complete(self) -> None:
        missing = [name for layer, name in enumerate(self.layers) if layer not in self._records]
        if missing:
            raise ValueError(
                f"The routers {', '.join(missing)} were not called, so their choices are not known: something "
                "replaced the layers around them. Load the model without hub kernels."
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _At:
    recorder: RouterRecorder
    layer: int
    scores: Scores


class _InjectGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_TA: Tensor, logits_TX: Tensor, at: _At) -> Tensor:
        ctx.save_for_backward(logits_TX)
        ctx.at = at
        # A copy, since what follows may write into it.
        return weight_TA.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (logits_TX,) = ctx.saved_tensors
        at = ctx.at
        return grad_outputs[0], at.recorder.logit_gradient(at.layer, at.scores, logits_TX), None
