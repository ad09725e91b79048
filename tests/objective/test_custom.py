from __future__ import annotations

import pytest
import torch

from harts.objective import CustomObjective, PolicyStreams, ppo
from tests.objective.building import rollouts, sample


def test_a_written_out_ppo_equals_the_built_in_one():
    def clipped(streams: PolicyStreams) -> torch.Tensor:
        ratio_P = torch.exp(streams.logprobs_P - streams.sampling_logprobs_P)
        plain_P, bounded_P = ratio_P * streams.advantages_P, ratio_P.clamp(0.8, 1.2) * streams.advantages_P
        return -torch.minimum(plain_P, bounded_P)

    step = sample(rollouts(spread=True))
    objective = CustomObjective(clipped, normalization="group", needs_sampling_logprobs=True)
    actual, expected = objective(step.streams("group")), ppo(normalization="group")(step.streams("group"))
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(actual.metrics["policy_loss"], expected.metrics["policy_loss"], rtol=1e-13, atol=1e-15)
    gradients = [torch.autograd.grad(output.loss, step.logprobs_P)[0] for output in (actual, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-15)


def test_needs_are_those_stated():
    def fn(streams: PolicyStreams) -> torch.Tensor:
        return -streams.logprobs_P

    plain = CustomObjective(fn)
    assert (plain.needs_sampling_logprobs, plain.needs_ref_logprobs, plain.needs_entropy) == (False, False, False)
    full = CustomObjective(fn, needs_sampling_logprobs=True, needs_ref_logprobs=True, needs_entropy=True)
    assert (full.needs_sampling_logprobs, full.needs_ref_logprobs, full.needs_entropy) == (True, True, True)


BAD_FUNCTIONS = {
    "a scalar": (lambda s: -s.logprobs_P.mean(), r"mine returned shape \(\), expected a tensor of shape \(\d+,\)"),
    "too short": (lambda s: -s.logprobs_P[1:], r"mine returned shape"),
    "a number": (lambda s: 0.0, "mine returned a float"),
    "nothing": (lambda s: None, "mine returned a NoneType"),
    "detached": (lambda s: -s.logprobs_P.detach(), "mine returned a loss without gradient.*Do not detach"),
}


@pytest.mark.parametrize("case", BAD_FUNCTIONS)
def test_a_function_that_returns_no_loss_per_token_is_refused(case: str):
    fn, message = BAD_FUNCTIONS[case]
    with pytest.raises(ValueError, match=message):
        CustomObjective(fn, name="mine")(sample(rollouts()).streams("token"))


def test_a_loss_without_gradient_is_fine_where_none_is_computed():
    step = sample(rollouts())
    with torch.no_grad():
        streams = step.streams("token", logprobs_P=step.logprobs_P.detach())
        assert CustomObjective(lambda s: -s.logprobs_P)(streams).loss.ndim == 0


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="normalization='mean'"):
        CustomObjective(lambda s: -s.logprobs_P, normalization="mean")  # type: ignore[arg-type]
