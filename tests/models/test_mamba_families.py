"""Settings of Mamba families that their tiny models do not have, each against one trajectory at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import harts
from harts.models.tiny import tiny_model
from tests.cases import BESIDE, trajectories_of
from tests.oracle import step_of
from tests.test_equivalence import FULL, assert_step_equals_oracle

BIASES = {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("bamba", {"mamba_n_groups": 1, "mamba_chunk_size": 256, "mamba_conv_bias": False, **BIASES}),
        ("nemotron_h", {"n_groups": 4, "chunk_size": 128, "use_conv_bias": False, "use_bias": True}),
        ("nemotron_h", {"moe_latent_size": None, "n_group": 1}),
        ("granitemoehybrid", {"position_embedding_type": None, "num_local_experts": 0}),
        ("falcon_h1", {"mamba_rms_norm": False, "projectors_bias": True}),
        ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_d_ssm": None, "time_step_limit": (1.0, 1.6)}),
        ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_mem_blocks": 1}),
        ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "num_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_variants_equal_training_each_trajectory_alone(model_type: str, overrides: dict[str, Any]):
    model = tiny_model(model_type, dtype=torch.float64, overrides=overrides)
    trajectories = trajectories_of(BESIDE)
    assert_step_equals_oracle(model, trajectories, FULL, expected=step_of(model, trajectories, FULL))


@pytest.mark.parametrize(
    ("model_type", "setting", "value", "scale"),
    [("granitemoehybrid", "logits_scaling", 4.0, 0.25), ("falcon_h1", "lm_head_multiplier", 0.25, 0.25)],
)
def test_logits_are_scaled_as_configured(model_type: str, setting: str, value: float, scale: float):
    assert harts.prepare(tiny_model(model_type, overrides={setting: value})).logit_scale == scale
