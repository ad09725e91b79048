"""Attention path by path: the definition's values and gradients, and the bits of each path alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.layers.tree_attention.by_paths import tree_attention_by_paths
from harts.layers.tree_attention.reference import tree_attention_reference
from harts.layout.attention_paths import attention_paths
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, RICH, Case, trajectories_of

FORMS = {"full": (None, False), "sinks": (None, True), "window": (20, False), "window_of_a_tile_sinks": (64, True)}


def lay_out(case: Case) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1))


def random_inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, num_tokens, 8), (2, num_tokens, 8), (2, num_tokens, 5)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case, form: str):
    layout, (window, sinks) = lay_out(case), FORMS[form]
    inputs = [x.requires_grad_() for x in random_inputs(layout.num_tokens, torch.float64)]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    query, key, value = inputs
    actual = tree_attention_by_paths(
        query, key, value, paths=layout.indices.attention_paths(), scale=0.3, window=window, sink_H=sink
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
    inputs += [] if sink is None else [sink]
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-13)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, inputs, upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12, scale=upstream.norm().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_is_bit_equal_to_each_path_alone(form: str, dtype: torch.dtype):
    layout, (window, sinks) = lay_out(RICH), FORMS[form]
    query, key, value = random_inputs(layout.num_tokens, dtype)
    sink = torch.randn(4) if sinks else None
    on_tree = tree_attention_by_paths(
        query, key, value, paths=layout.indices.attention_paths(), scale=0.3, window=window, sink_H=sink
    )
    tree = layout.indices.tree
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        length = path.numel()
        alone = tree_attention_by_paths(
            query[:, path],
            key[:, path],
            value[:, path],
            paths=attention_paths(np.full(length, length), np.arange(length)),
            scale=0.3,
            window=window,
            sink_H=sink,
        )
        assert torch.equal(alone, on_tree[:, path])
