"""The GPU path of the LM head with its kernels in Triton's interpreter, float32. Run by `test_fused.py`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.interpreter  # noqa: F401 - first, and skips without Triton
from harts.layers.gather import gather_rows
from harts.logprobs import linear_logprobs
from harts.logprobs.fused import FusedHead, fused_linear_logprobs
from harts.testing import assert_close
from tests.logprobs.test_linear_cross_entropy import ROWS, D, E, random_edges


@pytest.mark.parametrize(
    ("vocabulary", "at_once", "bias", "with_entropy"),
    [
        (97, 2**20, False, False),
        (97, 2**20, True, True),
        (300, 33 * 256, True, False),
        (300, 33 * 256, False, True),
        pytest.param(5000, 33 * 1024, False, False, marks=pytest.mark.slow),
        pytest.param(5000, 33 * 1024, True, True, marks=pytest.mark.slow),
        pytest.param(5000, 1, False, True, marks=pytest.mark.slow),
    ],
)
def test_equals_the_definition(vocabulary: int, at_once: int, bias: bool, with_entropy: bool):
    torch.manual_seed(vocabulary)
    head, edges = nn.Linear(D, vocabulary, bias=bias), random_edges()
    with torch.no_grad():
        head.weight.mul_(20)
    hidden = torch.randn(ROWS, D, requires_grad=True)
    leaves = [hidden, *head.parameters()]
    expected = [
        value
        for value in linear_logprobs(hidden, head, edges, with_entropy=with_entropy, logit_scale=0.5)
        if value is not None
    ]
    fused = FusedHead(
        target_E=edges.target_E,
        scale_E=(0.5 / edges.temperature_E).float(),
        with_entropy=with_entropy,
        logits_at_once=at_once,
    )
    actual = fused_linear_logprobs(gather_rows(hidden, edges.predictor_E), head.weight, head.bias, fused)
    upstream = [torch.randn(E) for _ in expected]
    wanted = torch.autograd.grad(expected, leaves, upstream)
    got = torch.autograd.grad([*actual][: len(expected)], leaves, upstream)
    for e, a in zip(expected, actual, strict=False):
        assert_close("value", e, a, ratio=2e-6)
    for e, a in zip(wanted, got, strict=True):
        assert_close("gradient", e, a, ratio=5e-6)


def test_frozen_head():
    head, edges = nn.Linear(D, 97, bias=False).requires_grad_(False), random_edges()
    hidden = torch.randn(E, D, requires_grad=True)
    fused = FusedHead(target_E=edges.target_E, scale_E=torch.ones(E), with_entropy=False)
    logprob_E, _ = fused_linear_logprobs(hidden, head.weight, head.bias, fused)
    logprob_E.sum().backward()
    expected = nn.functional.one_hot(edges.target_E, 97) - (hidden @ head.weight.T).softmax(-1)
    assert hidden.grad is not None
    assert_close("gradient", (expected @ head.weight).detach(), hidden.grad, ratio=2e-6)
