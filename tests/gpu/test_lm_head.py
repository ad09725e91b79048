"""The LM head on a GPU against float64: the definition's error in half precision, determinism, no host stalls."""

# ruff: noqa: E402 - without Triton the imports below fail

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
pytest.importorskip("triton")

from harts.layout.edges import LossEdges
from harts.logprobs import linear_cross_entropy, linear_logprobs
from harts.logprobs.fused import FusedHead, fused_linear_logprobs
from harts.testing import assert_close

NAMES = ("log-probs", "entropies", "hidden states", "weight", "bias")
SHAPES = {"odd": (1000, 512, 5003), "one edge": (1, 256, 1000), "qwen": (700, 1024, 151936)}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """`torch.empty` is NaN, so whatever is left unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def problem(edges: int, width: int, vocabulary: int, *, bias: bool) -> tuple[Tensor, nn.Linear, LossEdges]:
    torch.manual_seed(edges)
    head = nn.Linear(width, vocabulary, bias=bias).cuda().bfloat16()
    with torch.no_grad():
        head.weight.normal_(std=3 * width**-0.5)
    hidden = torch.randn(edges // 2 + 1, width, device="cuda").bfloat16().requires_grad_()
    return hidden, head, random_edges(hidden.shape[0], edges, vocabulary)


def random_edges(rows: int, edges: int, vocabulary: int) -> LossEdges:
    return LossEdges(
        predictor_E=torch.randint(0, rows, (edges,), device="cuda"),
        target_E=torch.randint(0, vocabulary, (edges,), device="cuda"),
        temperature_E=torch.rand(edges, device="cuda", dtype=torch.float64) + 0.5,
        edge_P=torch.arange(edges, device="cuda"),
    )


def values_and_gradients(hidden: Tensor, head: nn.Linear, edges: LossEdges, upstream: list[Tensor]) -> list[Tensor]:
    logprob_E, entropy_E = linear_logprobs(hidden, head, edges, with_entropy=True, logit_scale=0.5)
    assert entropy_E is not None
    outputs = [logprob_E, entropy_E]
    return [*outputs, *torch.autograd.grad(outputs, [hidden, *head.parameters()], upstream)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_error_is_the_definitions(shape: tuple[int, int, int], bias: bool, monkeypatch: pytest.MonkeyPatch):
    hidden, head, edges = problem(*shape, bias=bias)
    upstream = [torch.randn(shape[0], device="cuda") for _ in range(2)]
    wide = nn.Linear(shape[1], shape[2], bias=bias).cuda().double()
    wide.load_state_dict(head.state_dict())
    exact = values_and_gradients(hidden.detach().double().requires_grad_(), wide, edges, [u.double() for u in upstream])
    actual = values_and_gradients(hidden, head, edges, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = values_and_gradients(hidden, head, edges, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(linear_cross_entropy, "_has_kernels", lambda *_: False)
    plain = values_and_gradients(hidden, head, edges, upstream)
    for name, e, a, second, p in zip(NAMES, exact, actual, again, plain, strict=False):
        assert torch.equal(a, second), name
        budget = float((p.double() - e).norm() / e.norm())
        print(name, budget, float((a.double() - e).norm() / e.norm()))  # noqa: T201 - figures for the log of a run
        assert_close(name, e, a.double(), ratio=1.1 * budget + 1e-6)


@pytest.mark.parametrize("at_once", [1, 2**20, 2**29])
def test_float32_logits_and_any_chunk(at_once: int):
    hidden, head, edges = problem(1000, 512, 5003, bias=True)
    hidden = hidden[edges.predictor_E].detach().requires_grad_()
    fused = FusedHead(
        target_E=edges.target_E,
        scale_E=(1 / edges.temperature_E).float(),
        with_entropy=True,
        logits_dtype=torch.float32,
        logits_at_once=at_once,
    )
    wide = replace(edges, predictor_E=torch.arange(1000, device="cuda"))
    double = nn.Linear(512, 5003).cuda().double()
    double.load_state_dict(head.state_dict())
    upstream = [torch.randn(1000, device="cuda") for _ in range(2)]
    exact_hidden = hidden.detach().double().requires_grad_()
    exact = linear_logprobs(exact_hidden, double, wide, with_entropy=True)
    actual = fused_linear_logprobs(hidden, head.weight, head.bias, fused)
    for name, e, a in zip(NAMES, exact, actual, strict=False):
        assert e is not None
        assert_close(name, e, a.double(), ratio=1e-5)
    wide_upstream = [u.double() for u in upstream]
    wanted = torch.autograd.grad([*exact], [exact_hidden, *double.parameters()], wide_upstream)
    got = torch.autograd.grad([*actual], [hidden, *head.parameters()], upstream)
    for name, e, a in zip(NAMES[2:], wanted, got, strict=True):
        assert_close(name, e, a.double(), ratio=6e-3)


def test_frozen_head_without_gradient():
    hidden, head, edges = problem(300, 256, 1000, bias=False)
    head.requires_grad_(False)
    logprob_E, entropy_E = linear_logprobs(hidden, head, edges)
    assert entropy_E is None
    logprob_E.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    with torch.no_grad():
        assert torch.equal(linear_logprobs(hidden, head, edges)[0], logprob_E)
