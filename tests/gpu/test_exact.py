"""Exact mode on a GPU: fla, FlashAttention-4, the LM head's kernels and library matrix products, bit for bit."""

# ruff: noqa: E402 - without fla the imports below fail

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
pytest.importorskip("fla")
pytest.importorskip("flash_attn")

from fla.modules.norm.l2norm import l2norm_fwd

import harts
from harts.layers.linear_attention.fla_norms import MODULES, one_configuration, tuners_by_rows
from harts.layers.row_blocks import row_blocks
from harts.layout.kernels import Kernels
from harts.models.tiny import tiny_model
from tests.cases import RICH, trajectories_of

DTYPE = torch.bfloat16
EXACT = Kernels(attention="flash4", linear_attention="fla", exact=True)
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"]
WIDE: dict[str, Any] = {
    "vocab_size": 5003,
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "initializer_range": 0.02,
}
HYBRID = {
    **WIDE,
    "head_dim": 128,
    "layer_types": LAYERS,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [12, 10, 10],
    },
}
ATTENTION = {**WIDE, "head_dim": 64, "layer_types": ["full_attention"] * len(LAYERS), "use_sliding_window": False}
MODELS = {"hybrid_128": ("qwen3_5_text", HYBRID), "attention_64": ("qwen3", ATTENTION)}


@pytest.mark.parametrize("name", MODELS)
def test_tree_is_bit_equal_to_flat(name: str):
    model_type, overrides = MODELS[name]
    trajectories = trajectories_of(RICH)
    model = harts.prepare(tiny_model(model_type, dtype=DTYPE, overrides=overrides).cuda(), kernels=EXACT)
    longest = max(len(t) for t in trajectories)
    flat = harts.compute_logprobs(model, trajectories, execution="flat")
    assert np.isfinite(flat).all()
    different = {}
    for execution, limit in (("tree", 16384), ("tree", longest + 100), ("flat", longest)):
        logprobs = harts.compute_logprobs(model, trajectories, execution=execution, max_tokens_per_microbatch=limit)
        different[execution, limit] = int((logprobs != flat).sum())
    fast = replace(model, needs=replace(model.needs, kernels=replace(EXACT, exact=False)))
    different["tree", "fast"] = int((harts.compute_logprobs(fast, trajectories) != flat).sum())
    print(name, flat.size, different)  # noqa: T201 - figures for the log of a run
    assert different.pop(("tree", "fast")) > 0
    assert set(different.values()) == {0}


@pytest.mark.parametrize("width", [(1024, 3072), (1024, 8), (3072, 1024), (128, 5003)], ids=str)
def test_products_do_not_feel_other_rows(width: tuple[int, int]):
    """The first thing to look at if the model's bits differ: a library kernel that treats rows of a block unlike."""
    torch.manual_seed(0)
    weight = torch.randn(width[1], width[0], device="cuda", dtype=DTYPE)
    bias = torch.randn(width[1], device="cuda", dtype=DTYPE)
    x = torch.randn(1000, width[0], device="cuda", dtype=DTYPE)
    for function in (lambda x: F.linear(x, weight), lambda x: F.linear(x, weight, bias)):
        with row_blocks():
            whole = function(x)
            for rows in (1, 40, 300):
                assert torch.equal(function(x[:rows]), whole[:rows])
            for shift in (1, 8, 100, 257):
                assert torch.equal(function(x.roll(shift, 0)), whole.roll(shift, 0))


@pytest.mark.parametrize("width", [64, 128, 1024, 1027])
def test_reductions_do_not_feel_other_rows(width: int):
    torch.manual_seed(0)
    x = torch.randn(3000, width, device="cuda")
    for function in (lambda x: x.pow(2).mean(-1), lambda x: x.sum(-1), lambda x: x.softmax(-1)):
        with row_blocks():
            whole = function(x)
            for rows in (1, 7, 300):
                assert torch.equal(function(x[:rows]), whole[:rows])
            assert torch.equal(function(x.roll(101, 0)), whole.roll(101, 0))


def test_norms_of_fla_do_not_feel_other_rows():
    """Beyond 65,536 rows fla would measure another launch shape."""
    torch.manual_seed(0)
    x = torch.randn(140_000, 128, device="cuda", dtype=DTYPE)
    tuners = [tuner for module in MODULES for tuner in tuners_by_rows(module)]
    names = {tuner.base_fn.__name__ for tuner in tuners}
    before = [list(tuner.configs) for tuner in tuners]
    assert {"l2norm_fwd_kernel", "layer_norm_gated_fwd_kernel", "layer_norm_fwd_kernel"} <= names
    with one_configuration():
        assert all(len(tuner.configs) == 1 for tuner in tuners)
        (whole, whole_rstd), (part, part_rstd) = l2norm_fwd(x), l2norm_fwd(x[777:1777])
    assert torch.equal(part, whole[777:1777]) and torch.equal(part_rstd, whole_rstd[777:1777])
    assert [list(tuner.configs) for tuner in tuners] == before
