"""Tree attention against the dense ancestor mask, gradients included."""

from __future__ import annotations

import pytest
import torch

from harts.data import TrajectoryBatch
from harts.layers.tree_attention.reference import tree_attention_reference
from harts.layers.tree_attention.sdpa import tree_attention
from harts.layout.packed import LayoutNeeds, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of


@pytest.mark.parametrize(
    ("window", "value_width"),
    [(None, 8), (None, 5), (None, 11), (1, 8), (20, 5)],
    ids=["full", "narrow_values", "wide_values", "own_position", "window"],
)
@pytest.mark.parametrize("block", [3, 50, 128])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case, block: int, window: int | None, value_width: int):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1, query_block_size=block))
    shape = (layout.num_tokens, 8)
    query = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, layout.num_tokens, value_width, dtype=torch.float64, requires_grad=True)
    # Non-contiguous inputs, as transformers hands them over.
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    actual = tree_attention(transposed[0], transposed[1], transposed[2], layout=layout, scale=0.3, window=window)
    expected = tree_attention_reference(
        query,
        key.repeat_interleave(2, 0),
        value.repeat_interleave(2, 0),
        parent_T=layout.parent_T,
        scale=0.3,
        window=window,
    )
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-13)
    wanted = torch.autograd.grad(expected, [query, key, value], upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, [query, key, value], upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12, scale=upstream.norm().item())  # a window of 1 has no gradients
