"""Models whose linear attention runs through fla and our kernels, in the interpreter; see `test_fast_layers.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tests.interpreter  # noqa: F401 - first, and skips without Triton

pytest.importorskip("fla")

from triton.runtime.autotuner import Autotuner

import harts
from harts.layers.linear_attention import gated_delta_net, kimi_delta, mamba2
from harts.models.families import minimax
from harts.models.tiny import tiny_model
from harts.testing import assert_close, assert_gradients_close, gradients
from tests.cases import CASES, trajectories_of

OBJECTIVE = harts.grpo(kl_coef=0.1)
WIDTHS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "kimi_linear": {"linear_head_dim": 16},
    "bailing_hybrid": {"linear_head_dim": 16},
    "bamba": {"mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_expand": 2},
    "minimax": {},
}
"""Heads as wide as matrix instructions."""


@pytest.fixture(autouse=True)
def first_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device to find the fastest on."""
    monkeypatch.setattr(
        Autotuner, "run", lambda self, *args, **options: self.fn.run(*args, **options, **self.configs[0].kwargs)
    )


@pytest.mark.parametrize("model_type", WIDTHS)
def test_steps_equal_those_in_pytorch(model_type: str, monkeypatch: pytest.MonkeyPatch):
    trajectories = trajectories_of(next(c for c in CASES if c.name == "worked_example"))
    found = {}
    for kernel in ("torch", "fla"):
        for module in (gated_delta_net, kimi_delta, mamba2, minimax):
            monkeypatch.setattr(module, "linear_kernel", lambda *_args, _kernel=kernel, **_options: _kernel)
        model = harts.prepare(tiny_model(model_type, overrides=WIDTHS[model_type]))
        result = harts.train_step(model, trajectories, OBJECTIVE)
        found[kernel] = torch.from_numpy(result.logprobs_P), gradients(model.module)
    assert_close("log-probs", found["torch"][0], found["fla"][0], ratio=1e-5)
    assert_gradients_close(found["torch"][1], found["fla"][1], ratio=3e-4)
