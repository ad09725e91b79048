"""Whole models through the fast kernels: no less accurate than trajectories alone, without host stalls."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harts
from harts.check import check_model
from harts.check.own_layers import own_layers
from harts.check.synthetic import synthetic_rollouts
from harts.cli.load_model import load_model
from harts.data import TrajectoryBatch
from harts.layout.packed import pack
from harts.models.tiny import tiny_model
from harts.testing import float64_throughout, gradients
from harts.tree import build_prefix_tree
from tests.cases import RICH, trajectories_of
from tests.routing import follow_routes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
pytest.importorskip("fla")
QWEN3_5_1B = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3_5_1b.json"
OBJECTIVE = harts.grpo(kl_coef=0.1, entropy_coef=0.05)
PYTORCH = harts.Kernels(attention="sdpa", linear_attention="torch")
WIDE = {"hidden_size": 256, "initializer_range": 0.05}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [32, 16, 16]}
HEADS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": ROPE,
    },
    "kimi_linear": {
        "linear_head_dim": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 64,
    },
    "bamba": {"head_dim": 64, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 8, "mamba_expand": 2},
    "minimax": {"head_dim": 128},
    "lfm2": {"head_dim": 64},
    # With larger weights the errors of any execution grow to a third of the gradient.
    "gpt_oss": {"head_dim": 64, "initializer_range": 0.02},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "llama": {"head_dim": 128},
}
"""Of the sizes that kernels are made for."""


@pytest.fixture(autouse=True)
def few_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """fla would compile dozens of variants of each kernel to find the fastest."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    prune = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, options: prune(self, options)[:1])


def model_of(model_type: str, kernels: harts.Kernels | None, dtype: torch.dtype = torch.bfloat16) -> harts.TreeModel:
    model = tiny_model(model_type, dtype=torch.bfloat16, overrides={**WIDE, **HEADS[model_type]})
    return harts.prepare(model.to(dtype).cuda(), kernels=kernels)


@functools.cache
def truth(model_type: str) -> tuple[Any, np.ndarray, dict[str, torch.Tensor]]:
    """Trajectories with the routes that all executions follow, log-probs and gradients in float64."""
    model = model_of(model_type, PYTORCH, torch.float64)
    with own_layers(model.module), float64_throughout():
        trajectories = follow_routes(model, trajectories_of(RICH))
        result = harts.train_step(model, trajectories, OBJECTIVE, execution="flat")
    return trajectories, result.logprobs_P, gradients(model.module)


@pytest.mark.parametrize("model_type", HEADS)
def test_errors_are_those_of_trajectories_alone(model_type: str):
    """Through the kernels that transformers binds to its layers, or those of plain PyTorch."""
    trajectories, expected, expected_gradients = truth(model_type)
    size = sum(float(g.square().sum()) for g in expected_gradients.values())
    errors = {}
    for name, kernels, execution in (("fast", None, "tree"), ("torch", PYTORCH, "tree"), ("flat", None, "flat")):
        model = model_of(model_type, kernels)
        result = harts.train_step(model, trajectories, OBJECTIVE, execution=execution)
        grads = gradients(model.module)
        error = sum(float((grads[n].double() - g).square().sum()) for n, g in expected_gradients.items())
        errors[name] = (np.sqrt(np.mean((result.logprobs_P - expected) ** 2)), (error / size) ** 0.5)
    print(model_type, errors)  # noqa: T201 - figures for the log of a run
    for fast, torch_s, flat in zip(errors["fast"], errors["torch"], errors["flat"], strict=True):
        assert fast <= 1.25 * max(torch_s, flat)


def test_trees_differ_from_flat_little_more_than_flat_packed_otherwise():
    """Where layers round between their passes, trees round. Rounded elsewhere, log-probs are four times as far."""
    model = load_model(str(QWEN3_5_1B), dtype=torch.bfloat16, device="cuda")
    report = check_model(model, synthetic_rollouts(model.config.vocab_size), truth=False)
    assert report.repack is not None
    assert report.tree.mean_logprob < 2.5 * report.repack.mean_logprob
    assert 1 - report.tree.logit_cosine < 2 * (1 - report.repack.logit_cosine)


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "llama"])
def test_norms_and_mlps_of_liger(model_type: str):
    liger = pytest.importorskip("liger_kernel.transformers")
    trajectories, expected, _ = truth(model_type)
    errors = []
    for patched in (False, True):
        model = model_of(model_type, None).restore()
        if patched:
            liger._apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
        result = harts.train_step(harts.prepare(model), trajectories, OBJECTIVE)
        errors.append(np.sqrt(np.mean((result.logprobs_P - expected) ** 2)))
    assert errors[1] <= 1.25 * errors[0]


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear", "bamba", "minimax"])
def test_two_steps_have_equal_bits(model_type: str):
    """Log-probs always; gradients where attention was asked to be deterministic."""
    trajectories, *_ = truth(model_type)
    results = []
    for _ in range(2):
        model = model_of(model_type, harts.Kernels(deterministic=True))
        result = harts.train_step(model, trajectories, OBJECTIVE)
        results.append((result.logprobs_P, gradients(model.module)))
    assert np.array_equal(results[0][0], results[1][0])
    different = [name for name, grad in results[0][1].items() if not torch.equal(grad, results[1][1][name])]
    assert different == []


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "llama", "bamba", "lfm2"])
def test_layers_do_not_wait_for_the_device(model_type: str):
    model = model_of(model_type, None)
    batch = TrajectoryBatch.of(trajectories_of(RICH))
    layout = pack(build_prefix_tree(batch).largest_first(), batch, model.needs).to(model.device)
    for strict in (False, True):  # the first pass compiles and builds what kernels index with
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            hidden_TD = model.hidden_states(layout)
            hidden_TD.backward(torch.ones_like(hidden_TD))
        finally:
            torch.cuda.set_sync_debug_mode("default")
