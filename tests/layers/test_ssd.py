"""SSD on trees: against the token recurrence, and in float32 against each path alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.linear_attention.by_rounds import linear_attention_by_rounds
from harts.layers.linear_attention.ssd import SSDInputs, chunk_ssd, tree_ssd
from harts.layers.linear_attention.ssd_reference import ssd_reference
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from harts.tree.prefix_tree import PrefixTree
from tests.cases import CASES, RICH, Case, trajectories_of
from tests.layers.definition import derived

GROUPS, H, K, V = 2, 6, 8, 4


def lay_out(case: Case, chunk_size: int, *, replay: bool = True) -> tuple[PrefixTree, PackedLayout]:
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    return tree, pack(tree, batch, LayoutNeeds(chunk_size=chunk_size, conv_width=1, replay=replay))


def random_inputs(num_tokens: int, dtype: torch.dtype, *, strongest_decay: float = 2.0) -> SSDInputs:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    # From heads that forget nothing to heads that forget a token at once.
    rate = torch.linspace(0.0, strongest_decay, H, dtype=torch.float64)
    return SSDInputs(query=randn(GROUPS, K), key=randn(GROUPS, K), value=randn(H, V), decay=-rate * randn(H).abs()).map(
        lambda x: x.to(dtype).requires_grad_()
    )


def leaves(inputs: SSDInputs) -> list[Tensor]:
    return [inputs.query, inputs.key, inputs.value, inputs.decay]


@cache
def by_recurrence(case: Case) -> tuple[SSDInputs, Tensor, Tensor, Sequence[Tensor]]:
    """Inputs, their output by definition, random upstream gradients, and those of the inputs."""
    _, layout = lay_out(case, 64)
    inputs = random_inputs(layout.num_tokens, torch.float64)
    return inputs, *derived(ssd_reference(inputs, layout.parent_T), leaves(inputs))


@pytest.mark.parametrize("chunk_size", [64, 128, 256])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_token_recurrence(case: Case, replay: bool, chunk_size: int):
    _, layout = lay_out(case, chunk_size, replay=replay)
    inputs, expected, upstream, wanted = by_recurrence(case)
    actual = tree_ssd(inputs, layout.chunks)
    assert_close("output", expected, actual, ratio=1e-13)
    for e, a in zip(wanted, torch.autograd.grad(actual, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_rounds_is_bit_equal_to_one_call(case: Case):
    _, layout = lay_out(case, 64)
    assert layout.runs is not None
    inputs = random_inputs(layout.num_tokens, torch.float32)
    by_rounds = linear_attention_by_rounds(inputs, layout.runs, chunk_ssd, zero_state=torch.zeros(H, K, V))
    if matmul_ignores_batch_size(64):
        assert torch.equal(by_rounds, tree_ssd(inputs, layout.chunks))
    else:
        assert_close("output", tree_ssd(inputs, layout.chunks), by_rounds, ratio=1e-6)
    upstream = torch.randn_like(by_rounds)
    wanted = torch.autograd.grad(tree_ssd(inputs, layout.chunks), leaves(inputs), upstream)
    for e, a in zip(wanted, torch.autograd.grad(by_rounds, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-5)


def each_path_alone(inputs: SSDInputs, tree: PrefixTree, chunk_size: int) -> Tensor:
    outputs = []
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        batch = TrajectoryBatch.of([Trajectory.of(list(range(path.numel())))])
        layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=chunk_size, conv_width=1))
        outputs.append(tree_ssd(inputs.map(lambda x, path=path: x[path]), layout.chunks))
    return torch.cat(outputs)


def matmul_ignores_batch_size(chunk_size: int) -> bool:
    """Whether the library's batched matmul gives a matrix the same bits in any batch, at the sizes used here."""
    shapes = [
        ((chunk_size, K), (K, chunk_size)),
        ((chunk_size, chunk_size), (chunk_size, V)),
        ((K, chunk_size), (chunk_size, H // GROUPS * V)),
        ((chunk_size, K), (K, H // GROUPS * V)),
    ]
    pairs = [(torch.randn(12, *left), torch.randn(12, *right)) for left, right in shapes]
    return all(torch.equal(a @ b, torch.cat([a[i : i + 1] @ b[i : i + 1] for i in range(12)])) for a, b in pairs)


@pytest.mark.parametrize("chunk_size", [64, 128, 256])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_that_of_each_path_alone(case: Case, chunk_size: int):
    tree, layout = lay_out(case, chunk_size)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = tree_ssd(inputs, layout.chunks)[torch.from_numpy(flat_to_packed(tree))]
    alone = each_path_alone(inputs, tree, chunk_size)
    if matmul_ignores_batch_size(chunk_size):
        assert torch.equal(on_tree, alone)
    else:
        assert_close("output", alone, on_tree, ratio=1e-6)


def test_float32_without_replay_is_not():
    """The test above can fail: with chunks counted from branch points, later tokens round differently."""
    tree, layout = lay_out(RICH, 64, replay=False)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = tree_ssd(inputs, layout.chunks)[torch.from_numpy(flat_to_packed(tree))]
    assert (on_tree != each_path_alone(inputs, tree, 64)).float().mean() > 0.05


def test_strong_decays_keep_float32_precision():
    """A difference of two sums of 256 decays of -160 would be off by 4e-3; decays between tokens are summed."""
    _, layout = lay_out(RICH, 256)
    inputs = random_inputs(layout.num_tokens, torch.float32, strongest_decay=160.0)
    exact = ssd_reference(inputs.map(lambda x: x.double()), layout.parent_T)
    assert_close("output", exact, tree_ssd(inputs, layout.chunks).double(), ratio=1e-6)
