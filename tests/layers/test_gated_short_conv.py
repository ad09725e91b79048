"""The gated short convolution along paths: against the definition and against each path alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.short_conv.gated import tree_gated_short_conv
from harts.layers.short_conv.reference import tree_gated_short_conv_reference
from harts.layout.packed import LayoutNeeds, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

D, J = 6, 3
NEEDS = LayoutNeeds(chunk_size=None, conv_width=J)


class GatedShortConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, J, groups=D)
        self.in_proj = nn.Linear(D, 3 * D)
        self.out_proj = nn.Linear(D, D)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_definition(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, NEEDS)
    layer = GatedShortConv().double()
    hidden = torch.randn(layout.num_tokens, D, dtype=torch.float64, requires_grad=True)
    inputs: list[Tensor] = [hidden, *layer.parameters()]
    expected = tree_gated_short_conv_reference(layer, hidden, layout.parent_T)
    actual = tree_gated_short_conv(layer, hidden, layout)
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-14)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, inputs, upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_equals_each_path_alone(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    layout = pack(tree, batch, NEEDS)
    layer, hidden = GatedShortConv(), torch.randn(layout.num_tokens, D)
    on_tree = tree_gated_short_conv(layer, hidden, layout)
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        single = TrajectoryBatch.of([Trajectory.of(range(path.numel()))])
        alone = tree_gated_short_conv(layer, hidden[path], pack(build_prefix_tree(single), single, NEEDS))
        assert_close("path", alone, on_tree[path], ratio=1e-6)
