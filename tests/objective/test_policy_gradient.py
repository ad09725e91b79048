"""Against the formulas of the papers, written out one trajectory and one token at a time with min and max."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory
from harts.objective import (
    Normalization,
    PolicyGradient,
    cispo,
    dapo,
    grpo,
    gspo,
    loss_weights,
    ppo,
)
from tests.objective.building import Sample, rollouts, sample

FULL = {"kl_coef": 0.1, "entropy_coef": 0.02}
OBJECTIVES = {
    "grpo": grpo(),
    "grpo with all terms": grpo(**FULL),
    "dapo": dapo(),
    "dapo with dual clip": dapo(dual_clip=1.5, **FULL),
    "gspo": gspo(),
    "gspo with wide bounds": gspo(clip_low=0.1, clip_high=0.15, **FULL),
    "cispo": cispo(),
    "cispo with both bounds": cispo(clip_low=0.2, clip_high=0.3, **FULL),
    "ppo": ppo(),
    "ppo with dual clip": ppo(dual_clip=1.3, normalization="group", **FULL),
    "no bounds": PolicyGradient(clip_low=1.0, clip_high=math.inf),
}
objectives = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def expected_step(objective: PolicyGradient, step: Sample) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss with gradient, and metrics, from the definitions."""
    batch = step.batch
    weights = loss_weights(batch, objective.normalization)
    loss, metrics = torch.zeros((), dtype=torch.float64), {}

    def add(name: str, weight: float, value: torch.Tensor | bool) -> None:
        metrics[name] = metrics.get(name, 0.0) + float(weight) * float(torch.as_tensor(value).detach())

    for i in range(step.num_trajectories):
        tokens = np.flatnonzero(batch.trajectory_P == i).tolist()
        log_ratios = {t: step.logprobs_P[t] - float(batch.sampling_logprobs_P[t]) for t in tokens}
        for t in tokens:
            advantage, logprob = float(batch.advantages_P[t]), step.logprobs_P[t]
            log_ratio = log_ratios[t]
            if objective.ratio_level == "sequence":
                log_ratio = sum(log_ratios.values()) / len(tokens)
            ratio = torch.exp(log_ratio)
            low, high = 1 - objective.clip_low, 1 + objective.clip_high
            bounded = torch.clamp(ratio, low, high)
            if objective.surrogate == "weighted_logprob":
                gain = bounded.detach() * advantage * logprob
                is_low, is_high = ratio < low, ratio > high
            else:
                gain = torch.minimum(ratio * advantage, bounded * advantage)
                is_low, is_high = (advantage < 0) and ratio < low, (advantage > 0) and ratio > high
                if objective.dual_clip is not None and advantage < 0:
                    is_high = ratio > objective.dual_clip
                    gain = torch.maximum(gain, torch.full_like(gain, objective.dual_clip * advantage))
            value = -gain
            log_ref = float(batch.ref_logprobs_P[t]) - logprob
            k3 = torch.exp(log_ref) - log_ref - 1
            add("policy_loss", weights[t], value)
            add("ratio", weights[t], ratio)
            add("clip_fraction_low", weights[t], is_low)
            add("clip_fraction_high", weights[t], is_high)
            add("approx_kl", weights[t], torch.exp(log_ratios[t]) - log_ratios[t] - 1)
            if objective.kl_coef > 0:
                value = value + objective.kl_coef * k3
                add("kl", weights[t], k3)
            if objective.entropy_coef > 0:
                value = value - objective.entropy_coef * step.entropy_P[t]
                add("entropy", weights[t], step.entropy_P[t])
            loss = loss + float(weights[t]) * value
    return loss, metrics


def gradients(loss: torch.Tensor, step: Sample) -> list[torch.Tensor]:
    inputs = (step.logprobs_P, step.entropy_P)
    return list(torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True))


@objectives
@pytest.mark.parametrize("spread", [False, True], ids=["one advantage", "advantage per token"])
def test_loss_metrics_and_gradients_follow_the_paper(objective: PolicyGradient, spread: bool):
    step = sample(rollouts(spread=spread), distance=0.8)
    expected, expected_metrics = expected_step(objective, step)
    output = objective(step.streams(objective.normalization))
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-14)
    for actual, wanted in zip(gradients(output.loss, step), gradients(expected, step), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)
    assert {name: float(v) for name, v in output.metrics.items()} == pytest.approx(expected_metrics, rel=1e-12)
    assert not any(v.requires_grad for v in output.metrics.values())


@pytest.mark.parametrize("spread", [False, True], ids=["one advantage", "advantage per token"])
def test_the_sample_reaches_every_bound(spread: bool):
    """Otherwise the comparison above could not tell a missing bound."""
    step = sample(rollouts(spread=spread), distance=0.8)
    for name in OBJECTIVES.keys() - {"no bounds", "cispo"}:
        metrics = OBJECTIVES[name](step.streams("token")).metrics
        assert 0 < float(metrics["clip_fraction_low"]) < 1, name
        assert 0 < float(metrics["clip_fraction_high"]) < 1, name


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if not name.startswith("cispo")])
def test_gradcheck(name: str):
    objective = OBJECTIVES[name]
    step = sample(rollouts(spread=True), seed=2)

    def loss(logprobs_P: torch.Tensor, entropy_P: torch.Tensor) -> torch.Tensor:
        return objective(step.streams(objective.normalization, logprobs_P=logprobs_P, entropy_P=entropy_P)).loss

    assert torch.autograd.gradcheck(loss, (step.logprobs_P, step.entropy_P))


def test_cispo_gradient_is_the_bounded_ratio_times_the_advantage():
    step = sample(rollouts(), seed=3)
    objective = cispo(clip_low=0.2, clip_high=0.3)
    streams = step.streams("token")
    actual, _ = gradients(objective(streams).loss, step)
    ratio_P = torch.exp(streams.logprobs_P - streams.sampling_logprobs_P).detach()
    expected = -streams.loss_weight_P * ratio_P.clamp(0.8, 1.3) * streams.advantages_P
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [grpo, dapo, gspo, cispo, ppo])
def test_at_the_sampling_policy_all_are_the_plain_policy_gradient(make):
    step = sample(rollouts(), distance=0.0)
    objective = make(normalization="token")
    streams = step.streams("token")
    output = objective(streams)
    actual, _ = gradients(output.loss, step)
    assert torch.equal(streams.logprobs_P, streams.sampling_logprobs_P)
    torch.testing.assert_close(actual, -streams.loss_weight_P * streams.advantages_P, rtol=1e-13, atol=0)
    assert float(output.metrics["ratio"]) == pytest.approx(1.0, abs=1e-15)
    for name in ("clip_fraction_low", "clip_fraction_high", "approx_kl"):
        assert float(output.metrics[name]) == 0.0


@given(
    st.sampled_from(sorted(OBJECTIVES)),
    st.lists(st.integers(0, 2), min_size=6, max_size=6),
    st.integers(0, 20),
)
def test_any_split_into_microbatches_adds_up(name: str, microbatch_N: list[int], seed: int):
    objective = OBJECTIVES[name]
    step = sample(rollouts(seed, spread=True), seed=seed)
    whole = objective(step.streams(objective.normalization))
    losses, metrics = [], dict.fromkeys(whole.metrics, 0.0)
    for microbatch in range(3):
        # One of them may be empty, or hold nothing that is trained.
        only = [i for i in range(6) if microbatch_N[i] == microbatch]
        part = objective(step.streams(objective.normalization, only=only))
        losses.append(part.loss)
        metrics = {k: metrics[k] + float(part.metrics[k]) for k in metrics}
    total = torch.stack(losses).sum()
    torch.testing.assert_close(total, whole.loss, rtol=1e-12, atol=1e-13)
    for part, all_at_once in zip(gradients(total, step), gradients(whole.loss, step), strict=True):
        torch.testing.assert_close(part, all_at_once, rtol=1e-12, atol=1e-14)
    assert metrics == pytest.approx({k: float(v) for k, v in whole.metrics.items()}, rel=1e-12, abs=1e-13)


@objectives
@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_weight_two_counts_as_two_copies(objective: PolicyGradient, normalization: Normalization):
    objective = replace(objective, normalization=normalization)
    first, *rest = rollouts(4)
    heavy = sample([replace(first, weight=2.0), *rest])
    trained = int(first.loss_mask.sum())
    # The copy has the log-probs of the original.
    double = Sample(
        batch=sample([first, first, *rest]).batch,
        logprobs_P=torch.cat([heavy.logprobs_P[:trained], heavy.logprobs_P]),
        entropy_P=torch.cat([heavy.entropy_P[:trained], heavy.entropy_P]),
    )
    one, two = objective(heavy.streams(normalization)), objective(double.streams(normalization))
    torch.testing.assert_close(two.loss, one.loss, rtol=1e-12, atol=1e-14)
    for a, b in zip(gradients(two.loss, heavy), gradients(one.loss, heavy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def step_of_ratios(log_ratios: list[float], advantages: list[float]) -> Sample:
    """One trajectory whose trained tokens have these ratios."""
    trajectory = Trajectory.of(
        np.zeros(len(log_ratios) + 1, dtype=np.int64),
        advantages=[0.0, *advantages],
        sampling_logprobs=[0.0, *(-1.0 for _ in log_ratios)],
        ref_logprobs=-1.0,
    )
    step = sample([trajectory], distance=0.0)
    return replace(step, logprobs_P=torch.tensor([x - 1 for x in log_ratios], dtype=torch.float64, requires_grad=True))


def test_clip_fractions_count_each_side():
    # Above for a positive advantage, below for a negative one; the rest is let through.
    step = step_of_ratios([0.5, 0.5, -0.5, -0.5, 0.0, 0.5], [1, -1, 1, -1, 1, 0])
    metrics = ppo()(step.streams("token")).metrics
    assert float(metrics["clip_fraction_high"]) == pytest.approx(1 / 6)
    assert float(metrics["clip_fraction_low"]) == pytest.approx(1 / 6)
    dual = ppo(dual_clip=1.4)(step.streams("token")).metrics
    assert float(dual["clip_fraction_high"]) == pytest.approx(2 / 6)


def test_gspo_ratio_is_the_geometric_mean():
    step = step_of_ratios([0.3, -0.1, 0.1], [1, 1, 1])
    output = gspo(clip_high=0.5)(step.streams("sequence"))
    assert output.loss.item() == pytest.approx(-math.exp(0.1), rel=1e-14)
    actual, _ = gradients(output.loss, step)
    np.testing.assert_allclose(actual, -math.exp(0.1) / 3, rtol=1e-13)


@pytest.mark.parametrize("objective", [ppo(), dapo(dual_clip=3.0), gspo(), cispo()], ids=str)
def test_a_clipped_ratio_that_overflows_leaves_finite_gradients(objective: PolicyGradient):
    step = step_of_ratios([2000.0], [1.0])
    output = objective(step.streams("token"))
    actual, _ = gradients(output.loss, step)
    assert math.isfinite(output.loss.item())
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("metric", ["kl", "approx_kl"])
def test_k3_keeps_its_digits_near_the_other_policy(metric: str):
    # x**2 / 2 is far below the spacing of float64 near exp(x).
    step = step_of_ratios([1e-9], [0.0])
    value = grpo(kl_coef=1.0)(step.streams("token")).metrics[metric].item()
    assert value == pytest.approx(5e-19, rel=1e-5, abs=0)


def test_float32_stays_float32():
    step = sample(rollouts())
    streams = step.streams("sequence")
    names = ("logprobs_P", "entropy_P", "sampling_logprobs_P", "ref_logprobs_P", "advantages_P", "loss_weight_P")
    single = replace(streams, **{name: getattr(streams, name).float() for name in names})
    for objective in OBJECTIVES.values():
        output = objective(single)
        assert output.loss.dtype == torch.float32
        torch.testing.assert_close(output.loss.double(), objective(streams).loss, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "sampling", "ref", "entropy"),
    [
        (grpo(), True, False, False),
        (grpo(kl_coef=0.04), True, True, False),
        (gspo(entropy_coef=0.01), True, False, True),
        (cispo(report_entropy=True), True, False, True),
    ],
    ids=["plain", "kl", "entropy bonus", "entropy reported"],
)
def test_needs_follow_from_the_settings(objective: PolicyGradient, sampling: bool, ref: bool, entropy: bool):
    needs = (objective.needs_sampling_logprobs, objective.needs_ref_logprobs, objective.needs_entropy)
    assert needs == (sampling, ref, entropy)


def test_reported_entropy_does_not_change_the_loss():
    step = sample(rollouts())
    plain, reporting = grpo()(step.streams("sequence")), grpo(report_entropy=True)(step.streams("sequence"))
    assert torch.equal(plain.loss, reporting.loss)
    assert set(reporting.metrics) - set(plain.metrics) == {"entropy"}
    assert gradients(reporting.loss, step)[1].abs().max() == 0


def test_defaults_are_those_of_the_papers():
    assert (grpo().clip_low, grpo().clip_high, grpo().normalization) == (0.2, 0.2, "sequence")
    assert (dapo().clip_low, dapo().clip_high, dapo().normalization) == (0.2, 0.28, "token")
    assert (gspo().clip_low, gspo().clip_high, gspo().ratio_level) == (3e-4, 4e-4, "sequence")
    assert (cispo().clip_low, cispo().surrogate, cispo().normalization) == (1.0, "weighted_logprob", "token")
    assert (ppo().clip_low, ppo().clip_high, ppo().dual_clip) == (0.2, 0.2, None)


BAD_SETTINGS = {
    "normalization": ({"normalization": "mean"}, "normalization='mean', expected one of"),
    "ratio_level": ({"ratio_level": "group"}, "ratio_level='group', expected one of"),
    "surrogate": ({"surrogate": "none"}, "surrogate='none', expected one of"),
    "clip_low 0": ({"clip_low": 0.0}, r"clip_low=0.0, expected a number in \(0, 1\]. Use 1 "),
    "clip_low above 1": ({"clip_low": 1.2}, "clip_low=1.2"),
    "clip_low nan": ({"clip_low": math.nan}, "clip_low=nan"),
    "clip_high negative": ({"clip_high": -0.1}, "clip_high=-0.1, expected a number > 0. Use math.inf"),
    "clip_high nan": ({"clip_high": math.nan}, "clip_high=nan"),
    "dual_clip 1": ({"dual_clip": 1.0}, "dual_clip=1.0, expected a finite number > 1. Use None"),
    "dual_clip of cispo": ({"dual_clip": 3.0, "surrogate": "weighted_logprob"}, "dual_clip=3.0, expected None"),
    "kl_coef negative": ({"kl_coef": -1.0}, "kl_coef=-1.0, expected a finite number >= 0. Use 0"),
    "kl_coef infinite": ({"kl_coef": math.inf}, "kl_coef=inf"),
    "entropy_coef nan": ({"entropy_coef": math.nan}, "entropy_coef=nan"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused_by_name(case: str):
    settings, message = BAD_SETTINGS[case]
    with pytest.raises(ValueError, match=message):
        PolicyGradient(**settings)
