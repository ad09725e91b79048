"""The five streams of the gated delta rule, what decays are computed from, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatedDeltaInputs:
    """One row a token (or a row of the run order); all of one dtype, float32 or float64.

    Queries are scaled and, like keys, normalised already; query and key heads are repeated to the value heads.
    """

    query: Tensor
    """[rows, H, K]."""
    key: Tensor
    """[rows, H, K]."""
    value: Tensor
    """[rows, H, V]."""
    decay: Tensor
    """[rows, H], or [rows, H, K] for one a key channel. Log of the state's decay at the token, <= 0."""
    beta: Tensor
    """[rows, H]. Step of the delta rule, in [0, 1] (to 2 with negative eigenvalues)."""

    def map(self, function: Callable[[Tensor], Tensor]) -> GatedDeltaInputs:
        """The same function applied to each stream."""
        return GatedDeltaInputs(
            query=function(self.query),
            key=function(self.key),
            value=function(self.value),
            decay=function(self.decay),
            beta=function(self.beta),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecayGate:
    """Log-decays of Kimi Delta Attention by what they are computed from (arXiv 2510.26692, section 4).

    `-exp(log_rate) softplus(projected + bias)`, or `lower_bound sigmoid(exp(log_rate) (projected + bias))`.
    """

    projected_TD: Tensor
    """[T, H * K]."""
    log_rate_H: Tensor
    """[H]. `A_log`."""
    bias_D: Tensor
    """[H * K]. `dt_bias`."""
    lower_bound: float | None
    """< 0, which decays stay above; None without one."""
    dtype: torch.dtype
    """To which decays are rounded."""


class GatedNormModule(Protocol):
    """What is read of a transformers `RMSNormGated`, whatever its family."""

    weight: nn.Parameter
    variance_epsilon: float
    activation: str
    """"silu" or "sigmoid"."""

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """`weight * RMSNorm(hidden_states) * activation(gate)`, over the last dimension."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatedNorm:
    """The norm of every head's output, and what gates it."""

    module: GatedNormModule
    """Of V channels."""
    gate_THV: Tensor
    """[T, H, V] before its activation."""
    rounded: bool
    """Whether the module rounds what is normalised to the dtype of outputs before it is weighted, as Llama's does."""
