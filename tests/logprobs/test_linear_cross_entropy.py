"""Log-probs and entropies at loss edges against full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harts.layout.edges import LossEdges
from harts.logprobs import linear_cross_entropy, linear_logprobs, restore
from harts.testing import assert_close

ROWS, D, VOCABULARY, E = 20, 8, 97, 33


def random_edges() -> LossEdges:
    return LossEdges(
        predictor_E=torch.randint(0, ROWS, (E,)),
        target_E=torch.randint(0, VOCABULARY, (E,)),
        temperature_E=torch.rand(E, dtype=torch.float64) + 0.5,
        edge_P=torch.randint(0, E, (50,)),
    )


def full_logits(hidden: Tensor, head: nn.Linear, edges: LossEdges) -> tuple[Tensor, Tensor]:
    log_p = (head(hidden)[edges.predictor_E] / edges.temperature_E[:, None]).log_softmax(-1)
    return log_p.gather(1, edges.target_E[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, E, 1000])
def test_equals_full_logits(chunk: int, bias: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_cross_entropy, "LOGITS_PER_CHUNK", chunk * VOCABULARY)
    head, edges = nn.Linear(D, VOCABULARY, bias=bias).double(), random_edges()
    hidden = torch.randn(ROWS, D, dtype=torch.float64, requires_grad=True)
    leaves = [hidden, *head.parameters()]
    expected = full_logits(hidden, head, edges)
    actual = linear_logprobs(hidden, head, edges, with_entropy=True)
    upstream = torch.randn(2, E, dtype=torch.float64)
    wanted = torch.autograd.grad([*expected], leaves, [*upstream])
    for e, a in zip(expected, actual, strict=True):
        assert a is not None
        assert_close("value", e, a, ratio=1e-13)
    for e, a in zip(wanted, torch.autograd.grad([*actual], leaves, [*upstream]), strict=True):  # type: ignore[list-item]
        assert_close("gradient", e, a, ratio=1e-12)


def test_frozen_head_and_no_entropy():
    head, edges = nn.Linear(D, VOCABULARY, bias=False).requires_grad_(False), random_edges()
    hidden = torch.randn(ROWS, D, requires_grad=True)
    logprob_E, entropy_E = linear_logprobs(hidden, head, edges)
    assert entropy_E is None
    logprob_E.sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_returns_float32():
    head, edges = nn.Linear(D, VOCABULARY, bias=False).bfloat16(), random_edges()
    hidden = torch.randn(ROWS, D, dtype=torch.bfloat16, requires_grad=True)
    logprob_E, _ = linear_logprobs(hidden, head, edges)
    assert logprob_E.dtype == torch.float32
    logprob_E.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.bfloat16


def test_restore_gathers_and_sums_back():
    values = torch.randn(E, dtype=torch.float64, requires_grad=True)
    edge_P = torch.randint(0, E, (50,))
    restored = restore(values, edge_P)
    assert torch.equal(restored, values[edge_P])
    restored.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == torch.bincount(edge_P, minlength=E).tolist()
