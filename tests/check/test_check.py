"""The check passes what is exact, and fails what leaks or differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harts.check import check_model
from harts.check.run import STEPS
from harts.check.synthetic import synthetic_rollouts
from harts.layers.linear_attention import gated_delta_net
from harts.layout.packed import PackedLayout
from harts.layout.paths import TokenPaths
from harts.models import attention
from harts.models.tiny import tiny_model

ROLLOUTS = synthetic_rollouts(97, unit=32)
"""Half as long as the chunks ask for; a trunk of a chunk and a half remains."""


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text", "qwen3_next"])
@pytest.mark.parametrize(("dtype", "verdict"), [(torch.float64, "exact"), (torch.float32, "within-noise")])
def test_supported_models_pass(model_type: str, dtype: torch.dtype, verdict: str):
    model = tiny_model(model_type, dtype=dtype)
    done: list[str] = []
    report = check_model(model, ROLLOUTS, progress=done.append)
    assert (report.verdict, report.leak, report.passed) == (verdict, False, True)
    assert (report.tree_truth is None) == (dtype is torch.float64)
    assert tuple(done) == STEPS[: len(done)]
    assert report.tokens_distinct < report.tokens_flat == sum(map(len, ROLLOUTS))
    assert (report.rounds >= report.rounds_e > 0) == (report.replayed_tokens > 0) == (model_type != "qwen3")
    assert {p.grad for p in model.parameters()} == {None}
    assert not any(type(m).__module__.startswith("harts") for m in model.modules())


def test_bfloat16_stands_beside_flats_own_error():
    report = check_model(tiny_model("qwen3_5_text", dtype=torch.bfloat16), ROLLOUTS)
    assert report.verdict == "within-noise"
    assert report.tree_truth is not None and report.flat_truth is not None
    assert 0 < report.tree_truth.mean_logprob <= 1.05 * report.flat_truth.mean_logprob


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_convolution_that_reads_packed_neighbours_leaks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    def neighbours(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, layout: PackedLayout) -> Tensor:
        taps = weight_DJ.shape[1]
        return torch.nn.functional.conv1d(
            x_TD.T[None], weight_DJ[:, None], bias_D, padding=taps - 1, groups=x_TD.shape[1]
        )[0, :, : x_TD.shape[0]].T

    monkeypatch.setattr(gated_delta_net, "packed_short_conv", neighbours)
    report = check_model(tiny_model("qwen3_5_text", dtype=dtype), ROLLOUTS, truth=False)
    assert (report.verdict, report.leak, report.passed) == ("differs", True, False)
    leaking = {kind.name for kind in report.layer_kinds if kind.leaks}
    assert "Qwen3_5GatedDeltaNet" in leaking


def test_attention_that_is_slightly_off_differs_without_a_leak(monkeypatch: pytest.MonkeyPatch):
    exact = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda q, k, v, **options: exact(q * (1 + 1e-4), k, v, **options))
    report = check_model(tiny_model("qwen3"), ROLLOUTS)
    assert (report.verdict, report.leak) == ("differs", False)
    worst = max(report.layer_kinds, key=lambda kind: kind.output)
    assert worst.name == "Qwen3Attention"
    assert worst.output > 10 * worst.output_noise
    assert worst.own > 10 * worst.own_noise


def test_a_layer_that_rounds_elsewhere_shows_on_equal_inputs(monkeypatch: pytest.MonkeyPatch):
    """Nearer to float64 than flat, so no verdict finds it."""
    stored = gated_delta_net.packed_short_conv

    def unrounded(x_TD: Tensor, weight_DJ: Tensor, bias_D: Tensor | None, layout: PackedLayout) -> Tensor:
        return stored(x_TD.float(), weight_DJ.float(), bias_D, layout)

    own = {}
    for name, convolution in (("stored", stored), ("unrounded", unrounded)):
        monkeypatch.setattr(gated_delta_net, "packed_short_conv", convolution)
        report = check_model(tiny_model("qwen3_5_text", dtype=torch.bfloat16), ROLLOUTS, truth=False)
        own[name] = {kind.name: kind.own for kind in report.layer_kinds}
    eps = torch.finfo(torch.bfloat16).eps
    assert own["stored"]["Qwen3_5GatedDeltaNet"] < 0.01 * eps
    assert own["unrounded"]["Qwen3_5GatedDeltaNet"] > 0.5 * eps
    assert max(names["Qwen3_5Attention"] for names in own.values()) < 0.1 * eps


def test_a_wrong_gradient_alone_differs(monkeypatch: pytest.MonkeyPatch):
    exact = attention.tree_attention

    def forgets_half(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return exact(q, k, (v + v.detach()) / 2, **options)

    monkeypatch.setattr(attention, "tree_attention", forgets_half)
    report = check_model(tiny_model("qwen3"), ROLLOUTS)
    assert report.verdict == "differs"
    assert report.tree.max_gradient > 0.1 > report.tree.max_logprob


def test_a_report_is_json_with_the_headline_first():
    fields = check_model(tiny_model("qwen3"), ROLLOUTS, truth=False).to_dict()
    assert list(fields)[:8] == [
        "verdict",
        "max_logprob_diff",
        "max_grad_rel_diff",
        "logit_cosine",
        "rounds",
        "rounds_e",
        "replayed_tokens",
        "leak",
    ]
    assert "tree_truth" not in fields
    assert fields["gradients"].keys() == dict(tiny_model("qwen3").named_parameters()).keys()


def test_what_does_not_fit_the_model_is_named():
    with pytest.raises(ValueError, match="vocabulary"):
        check_model(tiny_model("qwen3"), synthetic_rollouts(1000))


def test_routers_of_a_tree_count_what_flat_counts():
    report = check_model(tiny_model("qwen3_5_moe_text", dtype=torch.float64), ROLLOUTS)
    fields = report.to_dict()
    assert 0 <= fields["aux_loss_rel_diff"] < 1e-10
    assert fields["load_count_diff"] == 0
    assert len(fields["routing_flips"]) == 3
    assert all(set(flips.values()) == {0} for flips in fields["routing_flips"].values())
    assert fields["tree"]["max_logprob_flipped"] == 0 < fields["tree"]["max_logprob_unflipped"]
    assert check_model(tiny_model("qwen3"), ROLLOUTS, truth=False).to_dict()["load_count_diff"] is None


def test_a_tree_whose_routers_choose_otherwise_shows_flips(monkeypatch: pytest.MonkeyPatch):
    exact = attention.tree_attention
    monkeypatch.setattr(attention, "tree_attention", lambda q, k, v, **options: exact(q, k, 1.3 * v, **options))
    report = check_model(tiny_model("qwen3_next"), ROLLOUTS, truth=False)
    routing = report.tree.routing
    assert routing is not None and report.rerun.routing is not None
    first, *after = routing.flips.values()
    assert first == 0 < min(after), "attention is the second layer"
    assert sum(report.rerun.routing.flips.values()) == 0
    assert routing.load_count > 0 < routing.aux_loss
    assert routing.max_logprob_flipped > 0


def test_counting_shared_tokens_once_differs(monkeypatch: pytest.MonkeyPatch):
    spread = TokenPaths.spread
    monkeypatch.setattr(TokenPaths, "spread", lambda paths, values_NX: spread(paths, values_NX).clamp(max=1))
    report = check_model(tiny_model("deepseek_v3", dtype=torch.float64), ROLLOUTS)
    assert (report.verdict, report.leak) == ("differs", False)
    assert report.tree.max_gradient < 1e-10
    assert report.tree.routing is not None and report.tree.routing.load_count > 100
