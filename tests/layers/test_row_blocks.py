"""Operators in row blocks: the operator's values, and bits that depend neither on other rows nor on the place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harts.layers.row_blocks import row_blocks
from harts.testing import assert_close

ROWS = 700
"""Several blocks and a part of one."""


def of_rows(name: str, width: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function of [rows, width] that treats every row alike."""
    torch.manual_seed(1)
    weight, bias = torch.randn(48, width, dtype=dtype), torch.randn(48, dtype=dtype)
    matrix = torch.randn(width, 5, dtype=dtype)
    return {
        "linear": lambda x: F.linear(x, weight),
        "linear with bias": lambda x: F.linear(x, weight, bias),
        "addmm of rows": lambda x: torch.addmm(F.pad(x, (0, 48 - width)), x, weight.T, beta=0.5),
        "out": lambda x: torch.mm(x, weight.T, out=x.new_empty(len(x), 48)),
        "addmm out": lambda x: torch.addmm(bias, x, weight.T, out=x.new_empty(len(x), 48)),
        "vector": lambda x: x @ matrix[:, 0],
        "batched": lambda x: (x[:, None] @ matrix.expand(len(x), -1, -1))[:, 0],
        "batched with bias": lambda x: torch.baddbmm(bias[:5], x[:, None], matrix.expand(len(x), -1, -1))[:, 0],
        "mean": lambda x: x.mean(-1, keepdim=True),
        "sum": lambda x: x.unflatten(-1, (1, -1)).sum(dim=[-1]),
        "softmax": lambda x: x.softmax(-1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "softplus": F.softplus,
        "gelu": lambda x: F.gelu(x, approximate="tanh"),
        "strided": lambda x: F.silu(x.T).T,
        "power": lambda x: x.abs() ** 0.3,
    }[name]


FUNCTIONS = [
    "linear",
    "linear with bias",
    "addmm of rows",
    "out",
    "addmm out",
    "vector",
    "batched",
    "batched with bias",
    "mean",
    "sum",
    "softmax",
    "log_softmax",
    "sigmoid",
    "silu",
    "softplus",
    "gelu",
    "strided",
    "power",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("width", [7, 33])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_does_not_feel_the_others(name: str, width: int, dtype: torch.dtype):
    function = of_rows(name, width, dtype)
    torch.manual_seed(0)
    x = torch.randn(ROWS, width).to(dtype)
    plain = function(x)
    with row_blocks():
        whole = function(x)
        assert whole.shape == plain.shape and whole.dtype == plain.dtype and whole.stride() == plain.stride()
        assert_close(name, plain.double(), whole.double(), ratio=8 * torch.finfo(dtype).eps)
        for rows in (1, 2, 40, 77, 300):
            assert torch.equal(function(x[:rows]), whole[:rows])
        for shift in (1, 3, 100, 257):
            assert torch.equal(function(x.roll(shift, 0)), whole.roll(shift, 0))
        assert function(x[:0]).shape == plain[:0].shape


def test_other_axes_are_left_alone():
    x, count = torch.randn(9, 7, 5), torch.arange(12).view(3, 4)
    with row_blocks():
        assert torch.equal(x.sum(0), x.clone().sum(0)) and x.sum(0).shape == (7, 5)
        assert x.mean((0, 2)).shape == (7,)
        assert x.softmax(1).sum(1).allclose(torch.ones(9, 5))
        assert torch.equal(count.sum(-1), torch.tensor([6, 22, 38]))


def test_gradients_are_those_of_the_operators():
    gradients = []
    for blocks in (False, True):
        torch.manual_seed(0)
        x = torch.randn(300, 8, dtype=torch.float64, requires_grad=True)
        first, second = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
        with row_blocks() if blocks else torch.enable_grad():
            hidden = F.silu(F.linear(x, first)) * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
            loss = F.linear(hidden, second).log_softmax(-1)[:, 0].sum()
            gradients.append(torch.autograd.grad(loss, [x, first, second]))
    for expected, actual in zip(*gradients, strict=True):
        assert_close("gradient", expected, actual, ratio=1e-13)
