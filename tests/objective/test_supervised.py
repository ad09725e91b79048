from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from harts.objective import Normalization, Supervised, loss_weights
from tests.objective.building import rollouts, sample


@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_loss_is_the_mean_negative_logprob(normalization: Normalization):
    step = sample(rollouts())
    output = Supervised(normalization=normalization)(step.streams(normalization))
    weights = loss_weights(step.batch, normalization)
    assert output.loss.item() == pytest.approx(-float(weights @ step.logprobs_P.detach().numpy()), rel=1e-13)
    assert {name: float(v) for name, v in output.metrics.items()} == {"policy_loss": output.loss.item()}
    (gradient,) = torch.autograd.grad(output.loss, step.logprobs_P)
    np.testing.assert_allclose(gradient, -weights, rtol=1e-14)


def test_it_needs_no_stream():
    objective = Supervised()
    needs = (objective.needs_sampling_logprobs, objective.needs_ref_logprobs, objective.needs_entropy)
    assert needs == (False, False, False)


def test_an_unknown_normalization_is_refused():
    with pytest.raises(ValueError, match="normalization='sum'"):
        Supervised(normalization="sum")  # type: ignore[arg-type]
