"""Short convolution along paths: against the definition and against PyTorch's convolution of each path alone."""

from __future__ import annotations

import pytest
import torch

from harts.data import TrajectoryBatch
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layers.short_conv.reference import tree_short_conv_reference
from harts.layout.packed import LayoutNeeds, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

D = 6


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case, bias: bool, width: int):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=width))
    x = torch.randn(layout.num_tokens, D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, width, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(D, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [x, weight, *([offset] if offset is not None else [])]
    upstream = torch.randn_like(x)
    expected = tree_short_conv_reference(x, weight, offset, layout.parent_T)
    actual = tree_short_conv(x, weight, offset, layout.ancestors_JT)
    assert_close("output", expected, actual, ratio=1e-14)
    for e, a in zip(
        torch.autograd.grad(expected, inputs, upstream), torch.autograd.grad(actual, inputs, upstream), strict=True
    ):
        assert_close("gradient", e, a, ratio=1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_equals_convolving_each_path_alone(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    layout = pack(tree, batch, LayoutNeeds(chunk_size=None, conv_width=4))
    x, weight = torch.randn(layout.num_tokens, D), torch.randn(D, 4)
    y = tree_short_conv(x, weight, None, layout.ancestors_JT)
    paths = torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist())
    for path in paths:
        alone = torch.nn.functional.conv1d(x[path].T[None], weight[:, None], padding=3, groups=D)[0, :, : path.numel()]
        assert_close("path", alone.T, y[path], ratio=1e-6)
