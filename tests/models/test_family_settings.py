"""Settings that change what a layer computes and that the tiny models hold at one value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import harts
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.testing import (
    assert_close,
    assert_gradients_close,
    float64_throughout,
    forward_one_trajectory_at_a_time,
    gradients,
)
from tests.cases import BESIDE, RICH, trajectories_of
from tests.oracle import step_of

OBJECTIVE = harts.grpo()
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale_all_dim": 1.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo_hybrid_without_positions": ("olmo_hybrid", {"rope_parameters": None}),
    "olmo_hybrid_of_positive_eigenvalues": ("olmo_hybrid", {"linear_allow_neg_eigval": False}),
    "deepseek_v3_with_one_query_projection": ("deepseek_v3", {"q_lora_rank": None}),
    "deepseek_v3_with_rotary_halves": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3_with_yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek_v3_with_values_wider_than_keys": ("deepseek_v3", {"v_head_dim": 20}),
    "kimi_linear_with_low_rank_queries": ("kimi_linear", {"q_lora_rank": 12}),
    "bailing_hybrid_with_an_unbounded_gate": ("bailing_hybrid", {"kda_safe_gate": False}),
    "bailing_hybrid_with_low_rank_queries": ("bailing_hybrid", {"q_lora_rank": 12}),
}
ROUTED = ["deepseek_v3", "kimi_linear", "bailing_hybrid"]
"""Families whose router adds a correction to what it chooses experts by."""


def skip_if_absent(model_type: str) -> None:
    if model_type not in supported_types():
        pytest.skip(f"the installed transformers has no {model_type}")


def assert_tree_equals_oracle(model: PreTrainedModel) -> None:
    trajectories = trajectories_of(BESIDE)
    expected = step_of(model, trajectories, OBJECTIVE)
    with float64_throughout():
        result = harts.train_step(harts.prepare(model), trajectories, OBJECTIVE)
    assert_close("log-probs", expected.logprobs_P, torch.from_numpy(result.logprobs_P), ratio=1e-10)
    assert_gradients_close(expected.gradients, gradients(model), ratio=1e-10)


@pytest.mark.parametrize(("model_type", "overrides"), VARIANTS.values(), ids=VARIANTS)
def test_a_setting_stays_exact(model_type: str, overrides: dict[str, Any]):
    skip_if_absent(model_type)
    assert_tree_equals_oracle(tiny_model(model_type, dtype=torch.float64, overrides=overrides))


@pytest.mark.parametrize("model_type", ROUTED)
def test_a_correction_of_the_router_is_read_and_left_as_it_is(model_type: str):
    skip_if_absent(model_type)
    model = tiny_model(model_type, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    corrections = [b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for correction in corrections:
        correction.copy_(torch.randn(correction.shape, generator=generator))
    before = [correction.clone() for correction in corrections]
    assert before
    assert_tree_equals_oracle(model)
    assert all(torch.equal(*pair) for pair in zip(before, corrections, strict=True))


def test_bailing_hybrid_with_a_convolution_kept_in_float32():
    """As checkpoints load in bfloat16."""
    skip_if_absent("bailing_hybrid")
    trajectories = trajectories_of(RICH)
    with torch.no_grad():
        exact = tiny_model("bailing_hybrid", dtype=torch.bfloat16).float()
        truth, _ = forward_one_trajectory_at_a_time(exact, trajectories, OBJECTIVE)
    model = tiny_model("bailing_hybrid", dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("conv1d"):
            module.float()
    prepared, errors = harts.prepare(model), {}
    for execution in ("tree", "flat"):
        logprobs = harts.compute_logprobs(prepared, trajectories, execution=execution)
        errors[execution] = np.sqrt(np.mean((logprobs - truth.double().numpy()) ** 2))
    assert 0 < errors["tree"] <= 1.05 * errors["flat"]


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "kimi_linear", "bailing_hybrid"])
def test_an_activation_that_the_convolution_shares_is_refused(model_type: str):
    skip_if_absent(model_type)
    with pytest.raises(ValueError, match="hidden_act is gelu, expected silu"):
        harts.prepare(tiny_model(model_type, overrides={"hidden_act": "gelu"}))
