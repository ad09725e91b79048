"""Two recordings of one step in, how far apart they are out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harts.check.recording import Recording
from harts.models import TreeModel

CANCELLED = 1e-4
"""Share of the whole gradient's norm below which a tensor's gradient is mostly what cancelled: the bias of a key
projection has none at all but for rounding. Relative differences are taken of no less."""
LOGITS_AT_ONCE = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingDifferences:
    """How far the routers of one recording are from those of another."""

    aux_loss: float
    """Largest relative difference of a loss of the routers: sequence-wise balance, z-loss."""
    load_count: float
    """Largest difference of a load: tokens that a layer sent to an expert."""
    flips: dict[str, int]
    """By router: tokens of trajectories that went to other experts, which a near-tie and a rounding suffice for."""
    max_logprob_unflipped: float
    """Largest absolute difference of a log-prob whose predictor no router sent elsewhere, nats."""
    max_logprob_flipped: float
    """The same where a router did; 0 without such."""

    def headline(self) -> dict[str, float]:
        """One figure of each kind."""
        return {
            "aux_loss": self.aux_loss,
            "load_count": self.load_count,
            "flips": sum(self.flips.values()),
            "max_logprob_unflipped": self.max_logprob_unflipped,
            "max_logprob_flipped": self.max_logprob_flipped,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """How far one recording is from another. Zero, and a cosine of 1, if they are equal."""

    max_logprob: float
    """Largest absolute difference of a trained token's log-prob, nats."""
    mean_logprob: float
    """Mean absolute difference, nats."""
    logit_cosine: float
    """Smallest over the trained tokens of the cosine between logits."""
    symmetric_kl: float
    """Mean over the trained tokens of KL(p, q) + KL(q, p), nats."""
    gradients: dict[str, float]
    """Relative difference of every parameter's gradient: Euclidean norms, over the reference's own norm or
    `CANCELLED` of the whole gradient's if that is larger."""
    gradient_rounding: dict[str, float]
    """Of every parameter, in the same unit: what one rounding of the whole gradient amounts to."""
    layers: dict[str, float]
    """Of every mixing layer's outputs, see `relative_rows`."""
    routing: RoutingDifferences | None
    """Of what the routers did; None without mixtures of experts."""

    def headline(self) -> dict[str, float]:
        """One figure of each kind."""
        return {
            "max_logprob": self.max_logprob,
            "mean_logprob": self.mean_logprob,
            "logit_cosine": self.logit_cosine,
            "symmetric_kl": self.symmetric_kl,
            "max_gradient": self.max_gradient,
            **({} if self.routing is None else self.routing.headline()),
        }

    @property
    def max_gradient(self) -> float:
        """Largest relative difference of a gradient; 0 without gradients."""
        return max(self.gradients.values(), default=0.0)


def differences(actual: Recording, expected: Recording, model: TreeModel, trained: Tensor) -> Differences:
    """Compare.

    Args:
        actual: A recording.
        expected: The reference, in the same or a wider dtype.
        model: Whose LM head turns hidden states into logits.
        trained: [P] int64. Places of the trained tokens among the F tokens; each is predicted from the one before.
    """
    logprob_P = np.abs(actual.logprobs_P - expected.logprobs_P)
    cosine, kl = _logits(actual.hidden_FD[trained - 1], expected.hidden_FD[trained - 1], model)
    relative, rounding = _gradients(actual.gradients, expected.gradients, model.device)
    return Differences(
        max_logprob=float(logprob_P.max()),
        mean_logprob=float(logprob_P.mean()),
        logit_cosine=cosine,
        symmetric_kl=kl,
        gradients=relative,
        gradient_rounding=rounding,
        layers={name: relative_rows(actual.layers[name], output) for name, output in expected.layers.items()},
        routing=_routing(actual, expected, logprob_P, trained),
    )


def _routing(
    actual: Recording, expected: Recording, logprob_P: NDArray[np.float64], trained: Tensor
) -> RoutingDifferences | None:
    if actual.router is None or expected.router is None:
        return None
    pairs = [(getattr(actual.router, name), getattr(expected.router, name)) for name in ("balance_loss", "z_loss")]
    flipped_F = {name: (actual.experts[name] != experts).any(-1) for name, experts in expected.experts.items()}
    flipped_P = torch.stack(list(flipped_F.values())).any(0)[trained - 1].numpy()
    return RoutingDifferences(
        aux_loss=max(abs(a - e) / abs(e) for a, e in pairs),
        load_count=float(np.abs(actual.router.load_MX - expected.router.load_MX).max()),
        flips={name: int(flipped.sum()) for name, flipped in flipped_F.items()},
        max_logprob_unflipped=float(logprob_P[~flipped_P].max(initial=0.0)),
        max_logprob_flipped=float(logprob_P[flipped_P].max(initial=0.0)),
    )


def relative_rows(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of a row, as a share of the root mean square of the rows' norms; 0 without rows."""
    if not expected.numel():
        return 0.0
    difference = (actual.double() - expected.double()).norm(dim=-1).max().item()
    size = expected.double().norm(dim=-1).square().mean().sqrt().item()
    return difference / size if size > 0 else difference


def _gradients(
    actual: dict[str, Tensor], expected: dict[str, Tensor], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    relative, rounding = {}, {}
    # One at a time on the model's device: billions of numbers take minutes on a CPU.
    norms = {name: g.to(device).double().norm().item() for name, g in expected.items()}
    whole = math.hypot(*norms.values())
    for name, gradient in expected.items():
        size = max(norms[name], CANCELLED * whole) or 1.0
        relative[name] = (actual[name].to(device).double() - gradient.to(device).double()).norm().item() / size
        rounding[name] = torch.finfo(actual[name].dtype).eps * whole / size
    return relative, rounding


@torch.no_grad()
def _logits(actual_PD: Tensor, expected_PD: Tensor, model: TreeModel) -> tuple[float, float]:
    """Smallest cosine and mean symmetric KL, a few rows of logits at a time."""
    head, device = model.head, model.device
    dtype = torch.promote_types(expected_PD.dtype, torch.float32)
    weight = head.weight.to(dtype)
    bias = None if head.bias is None else head.bias.to(dtype)
    cosine, kl = 1.0, 0.0
    step = max(1, LOGITS_AT_ONCE // weight.shape[0])
    for begin in range(0, actual_PD.shape[0], step):
        rows = (x[begin : begin + step].to(device, dtype) for x in (actual_PD, expected_PD))
        a, e = (model.logit_scale * nn.functional.linear(x, weight, bias).double() for x in rows)
        cosine = min(cosine, nn.functional.cosine_similarity(a, e, dim=-1).min().item())
        log_a, log_e = a.log_softmax(-1), e.log_softmax(-1)
        kl += ((log_a.exp() - log_e.exp()) * (log_a - log_e)).sum().item()
    return cosine, kl / actual_PD.shape[0]
