"""The selective scan on trees: against the token recurrence, and in float32 against each path alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from harts.data import Trajectory, TrajectoryBatch
from harts.layers.linear_attention import selective_scan
from harts.layers.linear_attention.selective_scan import CHUNK_SIZE, SelectiveScanInputs, tree_selective_scan
from harts.layers.linear_attention.selective_scan_reference import selective_scan_reference
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from harts.tree.prefix_tree import PrefixTree
from tests.cases import CASES, RICH, Case, trajectories_of
from tests.layers.definition import derived

D, K = 6, 4


def lay_out(case: Case) -> tuple[PrefixTree, PackedLayout]:
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    return tree, pack(tree, batch, LayoutNeeds(chunk_size=CHUNK_SIZE, conv_width=1))


def random_inputs(num_tokens: int, dtype: torch.dtype) -> SelectiveScanInputs:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Mean steps from 0.02 to 1.3 and rates from -4 to -1: states that outlive chunks and states that fade at once.
    shift = torch.linspace(-4.0, 1.0, D, dtype=torch.float64)
    inputs = {
        "value": randn(num_tokens, D),
        "step": torch.nn.functional.softplus(randn(num_tokens, D) + shift),
        "key": randn(num_tokens, K),
        "query": randn(num_tokens, K),
        "rate": -torch.arange(1.0, K + 1, dtype=torch.float64).repeat(D, 1),
    }
    return SelectiveScanInputs(**{name: x.to(dtype).requires_grad_() for name, x in inputs.items()})


def leaves(inputs: SelectiveScanInputs) -> list[Tensor]:
    return [inputs.value, inputs.step, inputs.key, inputs.query, inputs.rate]


@cache
def by_recurrence(case: Case) -> tuple[SelectiveScanInputs, Tensor, Tensor, Sequence[Tensor]]:
    """Inputs, their output by definition, random upstream gradients, and those of the inputs."""
    _, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float64)
    return inputs, *derived(selective_scan_reference(inputs, layout.parent_T), leaves(inputs))


@pytest.mark.parametrize("channels", [1, 4, D], ids=lambda n: f"{n}_channels_at_a_time")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_token_recurrence(case: Case, channels: int, monkeypatch: pytest.MonkeyPatch):
    _, layout = lay_out(case)
    monkeypatch.setattr(selective_scan, "MAX_ELEMENTS", channels * K * layout.chunks.token_GC.numel())
    inputs, expected, upstream, wanted = by_recurrence(case)
    actual = tree_selective_scan(inputs, layout.chunks)
    assert_close("output", expected, actual, ratio=1e-13)
    for e, a in zip(wanted, torch.autograd.grad(actual, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


def each_path_alone(inputs: SelectiveScanInputs, tree: PrefixTree) -> Tensor:
    outputs = []
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        batch = TrajectoryBatch.of([Trajectory.of(list(range(path.numel())))])
        layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=CHUNK_SIZE, conv_width=1))
        rows = {name: getattr(inputs, name)[path] for name in ("value", "step", "key", "query")}
        outputs.append(tree_selective_scan(replace(inputs, **rows), layout.chunks))
    return torch.cat(outputs)


def matvec_ignores_batch_size() -> bool:
    """Whether the library's batched product gives a matrix the same bits in any batch, at the sizes used here."""
    a, b = torch.randn(12, CHUNK_SIZE, D, K), torch.randn(12, CHUNK_SIZE, K, 1)
    return torch.equal(a @ b, torch.cat([a[i : i + 1] @ b[i : i + 1] for i in range(12)]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_that_of_each_path_alone(case: Case):
    tree, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = tree_selective_scan(inputs, layout.chunks)[torch.from_numpy(flat_to_packed(tree))]
    if matvec_ignores_batch_size():
        assert torch.equal(on_tree, each_path_alone(inputs, tree))
    else:
        assert_close("output", each_path_alone(inputs, tree), on_tree, ratio=1e-6)


def test_float32_is_that_of_the_token_recurrence():
    _, layout = lay_out(RICH)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    doubles = SelectiveScanInputs(
        value=inputs.value.double(),
        step=inputs.step.double(),
        key=inputs.key.double(),
        query=inputs.query.double(),
        rate=inputs.rate.double(),
    )
    exact = selective_scan_reference(doubles, layout.parent_T)
    assert_close("output", exact, tree_selective_scan(inputs, layout.chunks).double(), ratio=1e-6)
