"""Lightning attention on trees: against the token recurrence, and against each path alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.linear_attention.lightning import LightningDecays, tree_lightning_attention
from harts.layers.linear_attention.lightning_reference import lightning_attention_reference
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from harts.tree.prefix_tree import PrefixTree
from tests.cases import CASES, RICH, C, Case, trajectories_of

SLOPES = (0.0, 0.05, 0.7)
H, K, V = len(SLOPES), 8, 12


def lay_out(trajectories: Sequence[Trajectory], *, replay: bool = True) -> tuple[PrefixTree, PackedLayout]:
    batch = TrajectoryBatch.of(trajectories)
    tree = build_prefix_tree(batch)
    return tree, pack(tree, batch, LayoutNeeds(chunk_size=C, conv_width=1, replay=replay))


def random_inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, H, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for width in (K, K, V)
    ]


def run(inputs: list[Tensor], layout: PackedLayout) -> Tensor:
    decays = LightningDecays.of(torch.tensor(SLOPES, dtype=inputs[0].dtype), C)
    return tree_lightning_attention(inputs[0], inputs[1], inputs[2], decays=decays, chunks=layout.chunks)


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_token_recurrence(case: Case, replay: bool):
    _, layout = lay_out(trajectories_of(case), replay=replay)
    inputs = random_inputs(layout.num_tokens, torch.float64)
    slope_H = torch.tensor(SLOPES, dtype=torch.float64)
    expected = lightning_attention_reference(inputs[0], inputs[1], inputs[2], slope_H=slope_H, parent_T=layout.parent_T)
    actual = run(inputs, layout)
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-13)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, inputs, upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_equals_each_path_alone(case: Case):
    tree, layout = lay_out(trajectories_of(case))
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = run(inputs, layout)
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        _, alone = lay_out([Trajectory.of(range(path.numel()))])
        assert_close("path", run([x[path] for x in inputs], alone), on_tree[path], ratio=1e-6)


def test_float32_without_replay_rounds_otherwise():
    """Chunks counted from branch points: the same function, other bits."""
    _, layout = lay_out(trajectories_of(RICH))
    _, moved = lay_out(trajectories_of(RICH), replay=False)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    assert (run(inputs, layout) != run(inputs, moved)).float().mean() > 0.05
