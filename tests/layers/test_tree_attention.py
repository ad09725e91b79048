"""Tree attention against the dense ancestor mask, gradients included."""

from __future__ import annotations

import pytest
import torch

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.tree_attention.reference import tree_attention_reference
from harts.layers.tree_attention.sdpa import tree_attention
from harts.layout.packed import LayoutNeeds, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of


@pytest.mark.parametrize(
    ("block", "window", "value_width", "sinks"),
    [
        (128, None, 8, False),
        (3, None, 5, True),
        (50, None, 11, False),
        (50, 1, 8, True),
        (128, 20, 5, False),
        (3, 20, 8, True),
        (50, 20, 8, True),
    ],
    ids=["full", "narrow_values_sinks", "wide_values", "own_position_sinks", "window", "window_sinks", "window_50"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case, block: int, window: int | None, value_width: int, sinks: bool):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1, query_block_size=block))
    shape = (layout.num_tokens, 8)
    query = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, layout.num_tokens, value_width, dtype=torch.float64, requires_grad=True)
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    # Non-contiguous inputs, as transformers hands them over.
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    actual = tree_attention(
        transposed[0], transposed[1], transposed[2], layout=layout, scale=0.3, window=window, sink_H=sink
    )
    expected = tree_attention_reference(
        query,
        key.repeat_interleave(2, 0),
        value.repeat_interleave(2, 0),
        parent_T=layout.parent_T,
        scale=0.3,
        window=window,
        sink_H=sink,
    )
    inputs = [query, key, value, *([] if sink is None else [sink])]
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-13)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, inputs, upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12, scale=upstream.norm().item())  # a window of 1 has no gradients


def test_bfloat16_gradients_of_a_sink_keep_small_contributions():
    """Every token sees itself and the sink alike: 1000 times -1/4, which bfloat16 would stop adding up at -64."""
    batch = TrajectoryBatch.of([Trajectory.of([i]) for i in range(1000)])
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1, query_block_size=1))
    zero, one = torch.zeros(1, 1000, 1, dtype=torch.bfloat16), torch.ones(1, 1000, 1, dtype=torch.bfloat16)
    sink = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    tree_attention(zero, zero, one, layout=layout, scale=1.0, sink_H=sink).sum().backward()
    assert sink.grad is not None
    assert sink.grad.item() == -250
