"""Gathers: zero rows, and gradients added up in float32 and in order."""

from __future__ import annotations

import torch

from harts.layers.gather import gather_rows


def test_gathers_rows_and_zeros():
    source = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    index = torch.tensor([[1, 2], [0, 1]])
    rows = gather_rows(source, index)
    assert rows.tolist() == [[[3, 4], [0, 0]], [[1, 2], [3, 4]]]
    rows.sum().backward()
    assert source.grad is not None
    assert source.grad.tolist() == [[1, 1], [2, 2]]


def test_gradcheck():
    source = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 0, 5, 2, 0])
    assert torch.autograd.gradcheck(lambda x: gather_rows(x, index), source)


def test_bfloat16_gradients_keep_small_contributions():
    """256 ones added one by one in bfloat16 stop at 256 = 2^8; in float32 nothing is lost."""
    source = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(source, torch.zeros(1000, dtype=torch.int64)).sum().backward()
    assert source.grad is not None
    assert source.grad.item() == 1000
