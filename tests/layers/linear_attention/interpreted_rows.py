"""What goes into and comes out of linear attention, in Triton's interpreter, float32; see `test_kernels.py`."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

import tests.interpreter  # first, and skips without Triton
from harts.layers.activation import Activation
from harts.layers.linear_attention.inputs import DecayGate, GatedNorm
from harts.layers.linear_attention.kernels import mamba2_rows
from harts.layers.linear_attention.kernels.activated_rows import activated_rows
from harts.layers.linear_attention.kernels.decay_rows import decay_rows
from harts.layers.linear_attention.kernels.gated_norm import normed_outputs
from harts.layers.rows import copy_rows
from harts.testing import assert_close
from tests.layers.linear_attention.along_tree import TREES, Rows, rows_of

C = 16
HEADS, WIDTH = 3, 24
"""Channels that no tile divides."""


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    tests.interpreter.poison(monkeypatch)


@pytest.fixture
def rows() -> Rows:
    """Of branches that replay."""
    found = rows_of(TREES["branches around a boundary"](C), C)
    assert found.index.num_shared > 0
    return found


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_activated_rows(rows: Rows, activation: Activation):
    torch.manual_seed(0)
    mixed = torch.randn(rows.owner_T.numel(), HEADS, 3 * WIDTH, requires_grad=True)
    activated = torch.nn.functional.silu(mixed) if activation == "silu" else mixed
    expected = activated[rows.token_R].chunk(3, dim=-1)
    actual = activated_rows(mixed, rows.index, activation)
    upstream = [torch.randn_like(piece) for piece in expected]
    for name, e, a in zip("qkv", expected, actual, strict=True):
        assert a.is_contiguous()
        assert_close(name, e, a, ratio=1e-6)
    wanted, got = (torch.autograd.grad(pieces, mixed, upstream)[0] for pieces in (expected, actual))
    assert_close("gradient", wanted, got, ratio=1e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decay_rows(rows: Rows, lower_bound: float | None):
    torch.manual_seed(0)
    # Both sides of where softplus is taken for the identity.
    projected = 8 * torch.randn(rows.owner_T.numel(), HEADS * WIDTH)
    leaves = [x.requires_grad_() for x in (projected, torch.randn(HEADS), torch.randn(HEADS * WIDTH))]
    x = (leaves[0] + leaves[2]).unflatten(-1, (HEADS, WIDTH))
    rate = leaves[1].exp()[:, None]
    assert x.max() > 20
    expected = -rate * torch.nn.functional.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    gate = DecayGate(
        projected_TD=leaves[0], log_rate_H=leaves[1], bias_D=leaves[2], lower_bound=lower_bound, dtype=torch.float32
    )
    actual, expected = decay_rows(gate, rows.index), expected[rows.token_R]
    assert_close("decays", expected, actual, ratio=1e-6)
    upstream = torch.randn_like(expected)
    wanted, got = (torch.autograd.grad(decays, leaves, upstream) for decays in (expected, actual))
    for name, e, a in zip(("projected", "log-rate", "bias"), wanted, got, strict=True):
        assert_close(name, e, a, ratio=2e-6)


@pytest.mark.parametrize(("norm", "rounded"), [(Qwen3_5RMSNormGated, True), (KimiLinearRMSNormGated, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_norm(rows: Rows, norm: Callable[..., torch.nn.Module], rounded: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    module = norm(WIDTH, eps=1e-3)
    torch.nn.init.normal_(module.weight)
    module = module.to(dtype)
    output = torch.randn(rows.token_R.numel(), HEADS, WIDTH, dtype=dtype, requires_grad=True)
    gate = torch.randn(rows.owner_T.numel(), HEADS, WIDTH, dtype=dtype, requires_grad=True)
    expected = module(output[rows.owner_T], gate)
    actual = normed_outputs(output, GatedNorm(module=module, gate_THV=gate, rounded=rounded), rows.index)
    leaves, upstream = (output, gate, module.weight), torch.randn_like(expected)
    wanted, got = (torch.autograd.grad(normed, leaves, upstream) for normed in (expected, actual))
    assert not got[0][rows.index.owned_token_R < 0].any()
    if dtype == torch.float16:  # rounded at the same places; sums of squares may differ in their last bits
        assert (expected != actual).float().mean() < 1e-3
    ratio = 1e-6 if dtype == torch.float32 else 1e-3
    names = ("outputs", "gradient of outputs", "of the gate", "of the weight")
    for name, e, a in zip(names, (expected, *wanted), (actual, *got), strict=True):
        assert_close(name, e, a, ratio=ratio)


def test_nothing_is_kept_beside_saved_tensors(rows: Rows):
    """Which recomputation of activations takes away."""
    tokens, num_rows, log_rate = rows.owner_T.numel(), rows.token_R.numel(), torch.randn(HEADS, requires_grad=True)
    projected = torch.randn(tokens, HEADS * WIDTH) * log_rate.sum()
    gate_THV = torch.randn(tokens, HEADS, WIDTH) * log_rate.sum()
    decay = DecayGate(
        projected_TD=projected,
        log_rate_H=log_rate,
        bias_D=torch.randn(HEADS * WIDTH),
        lower_bound=None,
        dtype=torch.float32,
    )
    norm = GatedNorm(module=KimiLinearRMSNormGated(WIDTH), gate_THV=gate_THV, rounded=False)
    kept = [weakref.ref(tensor) for tensor in (projected, gate_THV)]
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
        computed = decay_rows(decay, rows.index), normed_outputs(torch.randn(num_rows, HEADS, WIDTH), norm, rows.index)
    del decay, norm, projected, gate_THV
    assert all(tensor.requires_grad for tensor in computed)
    assert [tensor() for tensor in kept] == [None, None]


def test_steps_and_skips_of_mamba2(rows: Rows):
    torch.manual_seed(0)
    num_rows = rows.token_R.numel()
    x, output = (torch.randn(num_rows, HEADS, WIDTH, requires_grad=True) for _ in range(2))
    step, skip = torch.rand(num_rows, HEADS, requires_grad=True), torch.randn(HEADS, requires_grad=True)
    value = x * step[..., None]
    tokens = (output + skip[:, None] * x)[rows.owner_T]
    assert torch.equal(mamba2_rows.times_steps(x.detach(), step.detach()), value)
    got = mamba2_rows.outputs_at_tokens(output.detach(), x.detach(), skip.detach(), rows.index.owner_T)
    assert torch.equal(got, tokens)
    upstream, dvalue = torch.randn_like(tokens), torch.randn_like(value)
    doutput, dx, dstep, dskip = torch.autograd.grad([tokens, value], [output, x, step, skip], [upstream, dvalue])
    dout = copy_rows(upstream, rows.index.owned_token_R, dtype=torch.float32)
    assert torch.equal(dout, doutput)
    found = mamba2_rows.input_gradients(dvalue, dout, x.detach(), step.detach(), skip.detach())
    for name, e, a in zip(("x", "step", "skip"), (dx, dstep, dskip), found, strict=True):
        assert_close(name, e, a, ratio=1e-6)
