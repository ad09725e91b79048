"""Exact mode: log-probs on trees are, bit for bit, those of every trajectory alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import harts
from harts.data import Trajectory
from harts.layers.row_blocks import row_blocks
from harts.layers.tree_attention.by_paths import tree_attention_by_paths
from harts.layout.attention_paths import attention_paths
from harts.layout.kernels import Kernels
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.testing import assert_gradients_close, float64_throughout, gradients
from tests.cases import CASES, RICH, Case, trajectories_of

EXACT = Kernels(exact=True)
QUICK = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "kimi_linear"]
"""Full attention, windows, sinks, Gated DeltaNet, Kimi Delta Attention and latent attention with experts."""
SAME_ARITHMETIC = ["llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "lfm2_moe", "qwen3_5_text", "qwen3_next"]
"""Whose layers on trees do what transformers' own do on a CPU; of the others, chunks are summed in another order."""
ALONE = "harts_exact_alone"


def types_of(quick: Sequence[str]) -> list[Any]:
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in supported_types() if name not in quick]
    return [*quick, *slow]


@pytest.mark.parametrize("model_type", types_of(QUICK))
def test_tree_is_bit_equal_to_flat(model_type: str):
    trajectories = trajectories_of(RICH)
    model = harts.prepare(tiny_model(model_type), kernels=EXACT)
    longest = max(len(t) for t in trajectories)
    flat = harts.compute_logprobs(model, trajectories, execution="flat")
    assert np.isfinite(flat).all()
    for limit in (16384, longest + 100, longest):
        assert np.array_equal(harts.compute_logprobs(model, trajectories, max_tokens_per_microbatch=limit), flat)
    for limit in (2 * longest, longest):
        again = harts.compute_logprobs(model, trajectories, execution="flat", max_tokens_per_microbatch=limit)
        assert np.array_equal(again, flat)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_every_tree(case: Case):
    model = harts.prepare(tiny_model("qwen3_5_text"), kernels=EXACT)
    trajectories = trajectories_of(case)
    flat = harts.compute_logprobs(model, trajectories, execution="flat")
    assert np.array_equal(harts.compute_logprobs(model, trajectories), flat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
@pytest.mark.parametrize("model_type", types_of(["gpt_oss", "qwen3_5_text", "kimi_linear"]))
def test_in_other_dtypes(model_type: str, dtype: torch.dtype):
    model = harts.prepare(tiny_model(model_type, dtype=dtype), kernels=EXACT)
    trajectories = trajectories_of(RICH)
    flat = harts.compute_logprobs(model, trajectories, execution="flat")
    assert np.array_equal(harts.compute_logprobs(model, trajectories), flat)


@pytest.mark.parametrize("model_type", types_of(QUICK))
def test_without_exact_mode_it_is_not(model_type: str):
    model, trajectories = harts.prepare(tiny_model(model_type)), trajectories_of(RICH)
    flat = harts.compute_logprobs(model, trajectories, execution="flat")
    assert (harts.compute_logprobs(model, trajectories) != flat).mean() > 0.01


def attend_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Exact attention behind transformers' interface, for one trajectory that fills a batch."""
    length = query.shape[2]
    output = tree_attention_by_paths(
        query[0],
        key[0],
        value[0],
        paths=attention_paths(np.full(length, length), np.arange(length)),
        scale=options["scaling"],
        window=options.get("sliding_window"),
        sink_H=options.get("s_aux"),
    )
    return output.transpose(0, 1)[None], None


AttentionInterface.register(ALONE, attend_alone)
AttentionMaskInterface.register(ALONE, sdpa_mask)


@torch.no_grad()
def transformers_alone(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> NDArray[np.float64]:
    """Log-probs from transformers' own layers, one trajectory at a time; attention alone is ours."""
    model.set_attn_implementation(ALONE)
    logprobs = []
    with row_blocks():
        for trajectory in trajectories:
            trained = torch.from_numpy(trajectory.loss_mask).nonzero()[:, 0]
            ids = torch.from_numpy(trajectory.token_ids)
            logits = model(ids[None], use_cache=False).logits[0, trained - 1]
            log_p = (logits / logits.new_tensor(trajectory.temperature)).log_softmax(-1)
            logprobs.append(log_p.gather(1, ids[trained, None])[:, 0].double().numpy())
    return np.concatenate(logprobs)


@pytest.mark.parametrize("model_type", SAME_ARITHMETIC)
def test_is_bit_equal_to_transformers_own_layers(model_type: str):
    trajectories = trajectories_of(RICH)
    expected = transformers_alone(tiny_model(model_type), trajectories)
    actual = harts.compute_logprobs(harts.prepare(tiny_model(model_type), kernels=EXACT), trajectories)
    assert np.array_equal(actual, expected)


def test_steps_train_in_exact_mode():
    results, grads = {}, {}
    for execution in ("tree", "flat"):
        model = harts.prepare(tiny_model("qwen3_5_text", dtype=torch.float64), kernels=EXACT)
        with float64_throughout():
            results[execution] = harts.train_step(
                model, trajectories_of(RICH), harts.grpo(entropy_coef=0.1), execution=execution
            )
        grads[execution] = gradients(model.module)
    assert np.array_equal(results["tree"].logprobs_P, results["flat"].logprobs_P)
    assert_gradients_close(grads["flat"], grads["tree"], ratio=1e-10)


def test_routes_are_recorded_alike():
    model, trajectories = harts.prepare(tiny_model("kimi_linear"), kernels=EXACT), trajectories_of(RICH)
    for tree, flat in zip(
        harts.record_routes(model, trajectories),
        harts.record_routes(model, trajectories, execution="flat"),
        strict=True,
    ):
        assert np.array_equal(tree, flat)


def test_what_has_no_exact_form_is_refused():
    with pytest.raises(ValueError, match="FlexAttention has no exact form"):
        Kernels(attention="flex", exact=True)
    model = tiny_model("qwen3_5_moe_text", overrides={"experts_implementation": "grouped_mm"})
    with pytest.raises(ValueError, match=r'set_experts_implementation\("eager"\)'):
        harts.prepare(model, kernels=EXACT)
