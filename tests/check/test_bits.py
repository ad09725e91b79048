"""The check of bits passes exact mode, and fails what depends on the tree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harts.check import check_bits
from harts.check.synthetic import synthetic_rollouts
from harts.models import attention
from harts.models.tiny import tiny_model

ROLLOUTS = synthetic_rollouts(97)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear"])
def test_exact_mode_passes(model_type: str, dtype: torch.dtype):
    model = tiny_model(model_type, dtype=dtype)
    experts = model.get_experts_implementation()
    done: list[str] = []
    report = check_bits(model, ROLLOUTS, progress=done.append)
    assert report.passed and (report.tokens_different, report.max_logprob_diff) == (0, 0.0)
    assert report.logit_cosine > 1 - 1e-12 and report.first_layer_different is None
    assert report.tokens_distinct < report.tokens_flat == sum(map(len, ROLLOUTS))
    assert report.tokens_trained == sum(int(t.loss_mask.sum()) for t in ROLLOUTS)
    assert done == ["flat", "tree"]
    assert model.get_experts_implementation() == experts
    assert not any(type(m).__module__.startswith("harts") for m in model.modules())


def test_one_bit_is_found(monkeypatch: pytest.MonkeyPatch):
    exact = attention.tree_attention
    calls: list[int] = []

    def once_more(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        calls.append(1)
        output = exact(q, k, v, **options)
        return torch.nextafter(output, torch.full_like(output, 9.0)) if len(calls) == 1 else output

    monkeypatch.setattr(attention, "tree_attention", once_more)
    report = check_bits(tiny_model("qwen3"), ROLLOUTS)
    assert report.verdict == "differs" and not report.passed
    assert report.tokens_different > 0 and 0 < report.max_logprob_diff < 1e-4
    assert report.logit_cosine > 1 - 1e-6 and report.first_layer_different == "model.layers.0.self_attn"
