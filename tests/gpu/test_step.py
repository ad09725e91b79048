"""The step on a GPU: the same PyTorch path on another device, against trajectory-wise execution there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import harts
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.testing import assert_close, assert_gradients_close, float64_throughout, gradients
from tests.cases import CASES, RICH, Case, trajectories_of
from tests.routing import follow_routes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
OBJECTIVE = harts.grpo(kl_coef=0.1, entropy_coef=0.05)
PYTORCH = harts.Kernels(attention="sdpa", linear_attention="torch")


@pytest.mark.parametrize("model_type", supported_types())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tree_equals_flat_in_float64(case: Case, model_type: str):
    trajectories, results, grads = trajectories_of(case), {}, {}
    for execution in ("tree", "flat"):
        model = harts.prepare(tiny_model(model_type, dtype=torch.float64).cuda())
        with float64_throughout():
            results[execution] = harts.train_step(model, trajectories, OBJECTIVE, execution=execution)
        grads[execution] = gradients(model.module)
    logprobs = [torch.from_numpy(results[e].logprobs_P) for e in ("flat", "tree")]
    assert_close("log-probs", logprobs[0], logprobs[1], ratio=1e-10)
    assert_gradients_close(grads["flat"], grads["tree"], ratio=1e-10)


@pytest.mark.parametrize("model_type", supported_types())
def test_bfloat16_error_is_flats(model_type: str):
    truth = harts.prepare(tiny_model(model_type, dtype=torch.bfloat16).double().cuda())
    with float64_throughout():
        trajectories = follow_routes(truth, trajectories_of(RICH))
        expected = harts.compute_logprobs(truth, trajectories, execution="flat")
    errors = {}
    for execution in ("tree", "flat"):
        model = harts.prepare(tiny_model(model_type, dtype=torch.bfloat16).cuda(), kernels=PYTORCH)
        result = harts.train_step(model, trajectories, OBJECTIVE, execution=execution)
        errors[execution] = np.sqrt(np.mean((result.logprobs_P - expected) ** 2))
    print(model_type, errors)  # noqa: T201 - figures for the log of a run
    assert errors["tree"] <= 1.05 * errors["flat"]
