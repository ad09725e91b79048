"""Clipped policy gradients: GRPO, DAPO, GSPO, CISPO and PPO are settings of one objective.

Advantages come with the trajectories; how they were estimated (a critic, the group's mean) is not known here.
Bounds on the ratio are applied to its logarithm, before the exponential: a clipped token then has a gradient of
exactly zero even where its ratio would overflow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from harts.objective.normalization import check_normalization
from harts.objective.streams import Normalization, ObjectiveOutput, PolicyStreams

RatioLevel = Literal["token", "sequence"]
Surrogate = Literal["clipped_ratio", "weighted_logprob"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGradient:
    """A policy gradient with a bounded importance ratio, a KL penalty and an entropy bonus.

    Metrics, each a mean under the loss weights: `policy_loss`; `ratio`, unclipped; `clip_fraction_low` and
    `clip_fraction_high`, tokens whose ratio was replaced by a bound (the dual clip counts as high); `approx_kl`, the
    k3 estimate of the divergence from the sampling policy; `kl`, that from the reference policy, if penalised;
    `entropy`, if computed.

    Example:
        >>> grpo(kl_coef=0.04).needs_ref_logprobs
        True
    """

    name: str = "PolicyGradient"
    """What messages call it."""
    ratio_level: RatioLevel = "token"
    """Whose ratio to the sampling policy is used: each token's, or for all tokens of a trajectory the geometric mean
    of theirs."""
    surrogate: Surrogate = "clipped_ratio"
    """"clipped_ratio": the pessimistic minimum of PPO. "weighted_logprob": the log-probability times the bounded
    ratio, which is held constant, so no token loses its gradient."""
    clip_low: float = 0.2
    """In (0, 1]. The ratio is bounded below by `1 - clip_low`; 1 for no bound."""
    clip_high: float = 0.2
    """> 0. The ratio is bounded above by `1 + clip_high`; infinity for no bound."""
    dual_clip: float | None = None
    """> 1. Bound on the ratio of tokens with a negative advantage, which `clip_high` leaves unbounded; None for no
    bound (arXiv 1912.09729, eq. 5)."""
    kl_coef: float = 0.0
    """>= 0. Weight of the k3 estimate of the divergence from the reference policy."""
    entropy_coef: float = 0.0
    """>= 0. Weight of the entropy bonus."""
    report_entropy: bool = False
    """Whether entropies are computed for the metrics even without a bonus."""
    normalization: Normalization = "token"
    """What the loss is a mean over."""

    def __post_init__(self) -> None:
        check_normalization(self.normalization)
        _check_choice(self, "ratio_level", self.ratio_level, get_args(RatioLevel))
        _check_choice(self, "surrogate", self.surrogate, get_args(Surrogate))
        if not 0 < self.clip_low <= 1:
            raise _bad(self, "clip_low", self.clip_low, "a number in (0, 1]", "Use 1 for no lower bound.")
        if not self.clip_high > 0:
            raise _bad(self, "clip_high", self.clip_high, "a number > 0", "Use math.inf for no upper bound.")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise _bad(self, "dual_clip", self.dual_clip, "a finite number > 1", "Use None for no such bound.")
        if self.dual_clip is not None and self.surrogate != "clipped_ratio":
            fix = f"Use None: {self.surrogate!r} bounds the ratio whatever the sign of the advantage."
            raise _bad(self, "dual_clip", self.dual_clip, "None", fix)
        for field, value in (("kl_coef", self.kl_coef), ("entropy_coef", self.entropy_coef)):
            if not 0 <= value < math.inf:
                raise _bad(self, field, value, "a finite number >= 0", "Use 0 to leave the term out.")

    def __str__(self) -> str:
        return self.name

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Always: the ratio is one to the sampling policy."""
        return True

    @property
    def needs_ref_logprobs(self) -> bool:
        """If there is a KL penalty."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """If there is an entropy bonus, or `report_entropy`."""
        return self.entropy_coef > 0 or self.report_entropy

    def __call__(self, streams: PolicyStreams) -> ObjectiveOutput:
        """The loss of these trajectories, and their share of the metrics."""
        assert streams.sampling_logprobs_P is not None
        token_log_ratio_P = streams.logprobs_P - streams.sampling_logprobs_P
        log_ratio_P = token_log_ratio_P
        if self.ratio_level == "sequence":
            log_ratio_P = trajectory_means(token_log_ratio_P, streams)
        lower_P, upper_P = self._log_bounds(streams.advantages_P)
        ratio_P = log_ratio_P.clamp(lower_P, upper_P).exp()
        if self.surrogate == "clipped_ratio":
            policy_loss_P = -streams.advantages_P * ratio_P
        else:
            policy_loss_P = -streams.advantages_P * ratio_P.detach() * streams.logprobs_P
        values = {
            "policy_loss": policy_loss_P,
            "ratio": log_ratio_P.exp(),
            "clip_fraction_low": (log_ratio_P < lower_P).to(log_ratio_P.dtype),
            "clip_fraction_high": (log_ratio_P > upper_P).to(log_ratio_P.dtype),
            "approx_kl": torch.expm1(token_log_ratio_P) - token_log_ratio_P,
        }
        loss_P = policy_loss_P
        if self.needs_ref_logprobs:
            assert streams.ref_logprobs_P is not None
            values["kl"] = k3_divergence(streams.logprobs_P, streams.ref_logprobs_P)
            loss_P = loss_P + self.kl_coef * values["kl"]
        if self.needs_entropy:
            assert streams.entropy_P is not None
            values["entropy"] = streams.entropy_P
        if self.entropy_coef > 0:
            loss_P = loss_P - self.entropy_coef * values["entropy"]
        weight_P = streams.loss_weight_P
        metrics = {name: (weight_P * value_P.detach()).sum() for name, value_P in values.items()}
        return ObjectiveOutput(loss=(weight_P * loss_P).sum(), metrics=metrics)

    def _log_bounds(self, advantages_P: Tensor) -> tuple[Tensor, Tensor]:
        """[P] and [P]. Lowest and highest logarithm of the ratio that the policy loss lets through."""
        low = math.log1p(-self.clip_low) if self.clip_low < 1 else -math.inf
        high = math.log1p(self.clip_high)
        lower_P, upper_P = torch.full_like(advantages_P, low), torch.full_like(advantages_P, high)
        if self.surrogate == "clipped_ratio":
            # min(r * A, clip(r) * A) binds above for A > 0 and below for A < 0 only.
            dual = math.inf if self.dual_clip is None else math.log(self.dual_clip)
            lower_P = lower_P.masked_fill(advantages_P >= 0, -math.inf)
            upper_P = upper_P.masked_fill(advantages_P <= 0, math.inf).masked_fill(advantages_P < 0, dual)
        return lower_P, upper_P


def k3_divergence(logprobs_P: Tensor, ref_logprobs_P: Tensor) -> Tensor:
    """[P] >= 0. Estimate of KL(policy || reference) at tokens drawn from the policy.

    Schulman, "Approximating KL Divergence" (2020), estimator k3; GRPO, arXiv 2402.03300, eq. 4.
    """
    log_ratio_P = ref_logprobs_P - logprobs_P
    # exp(x) - 1 loses all digits near x = 0, which is where training starts.
    return torch.expm1(log_ratio_P) - log_ratio_P


def trajectory_means(values_P: Tensor, streams: PolicyStreams) -> Tensor:
    """[P] float. The mean over the trained tokens of a token's trajectory."""
    count_N = torch.bincount(streams.trajectory_P, minlength=streams.num_trajectories)
    # The tokens of a trajectory are contiguous, so each sum has a fixed order, on a GPU too.
    sum_N = torch.segment_reduce(values_P, "sum", lengths=count_N, initial=0.0, unsafe=True)
    return (sum_N / count_N.clamp(min=1))[streams.trajectory_P]


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    normalization: Normalization = "sequence",
) -> PolicyGradient:
    """Group relative policy optimisation (DeepSeekMath, arXiv 2402.03300).

    The paper penalises the divergence from a reference policy with `kl_coef=0.04`; the default needs no reference.
    Its advantages are rewards minus the group's mean, over the group's standard deviation.

    Args:
        clip_low: In (0, 1]; see `PolicyGradient`, also for the others.
        clip_high: > 0.
        kl_coef: >= 0.
        entropy_coef: >= 0.
        report_entropy: Compute entropies for the metrics.
        normalization: "sequence" as in the paper.

    Returns:
        The objective.

    Raises:
        ValueError: If a setting is out of range.
    """
    return PolicyGradient(
        name="GRPO",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        report_entropy=report_entropy,
        normalization=normalization,
    )


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    normalization: Normalization = "token",
) -> PolicyGradient:
    """Decoupled clip policy optimisation (arXiv 2503.14476): a wider upper bound, a mean over tokens, no KL penalty.

    Dynamic sampling and overlong reward shaping, the paper's other two parts, belong to the rollouts.

    Args, Returns, Raises: As `grpo`; `dual_clip` > 1 or None.
    """
    return PolicyGradient(
        name="DAPO",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        report_entropy=report_entropy,
        normalization=normalization,
    )


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    normalization: Normalization = "sequence",
) -> PolicyGradient:
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio a trajectory, bounds as in its section 5.1.

    The ratio of a trajectory is the geometric mean of those of its trained tokens. Its loss is spread over these
    tokens' loss weights, so their advantages should be equal, as they are in the paper.

    Args, Returns, Raises: As `grpo`.
    """
    return PolicyGradient(
        name="GSPO",
        ratio_level="sequence",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        report_entropy=report_entropy,
        normalization=normalization,
    )


def cispo(
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    normalization: Normalization = "token",
) -> PolicyGradient:
    """Clipped importance weights (MiniMax-M1, arXiv 2506.13585): the ratio weighs the log-probability, held constant.

    As in the paper there is no lower bound. It gives no number for the upper one; the default allows weights up to 5.

    Args, Returns, Raises: As `grpo`.
    """
    return PolicyGradient(
        name="CISPO",
        surrogate="weighted_logprob",
        clip_low=clip_low,
        clip_high=clip_high,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        report_entropy=report_entropy,
        normalization=normalization,
    )


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    report_entropy: bool = False,
    normalization: Normalization = "token",
) -> PolicyGradient:
    """The clipped surrogate of proximal policy optimisation (arXiv 1707.06347, eq. 7), without the value loss.

    Args, Returns, Raises: As `grpo`; `dual_clip` > 1 or None, 3 in arXiv 1912.09729.
    """
    return PolicyGradient(
        name="PPO",
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        report_entropy=report_entropy,
        normalization=normalization,
    )


def _check_choice(objective: PolicyGradient, field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _bad(objective, field, repr(value), f"one of {choices}", "Use one of these.")


def _bad(objective: PolicyGradient, field: str, got: object, expected: str, fix: str) -> ValueError:
    return ValueError(f"{objective} got {field}={got}, expected {expected}. {fix}")
