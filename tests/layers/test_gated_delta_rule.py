"""The gated delta rule on trees: against the token recurrence, and bit for bit against each path alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.layers.linear_attention.by_rounds import linear_attention_by_rounds
from harts.layers.linear_attention.chunk_core import chunk_gated_delta_rule, tree_gated_delta_rule
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.reference import gated_delta_rule_reference
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from harts.tree.prefix_tree import PrefixTree
from tests.cases import CASES, RICH, Case, trajectories_of
from tests.layers.definition import derived

C, H, K, V = 64, 2, 8, 12
EXECUTIONS: dict[str, Callable[[GatedDeltaInputs, PackedLayout], Tensor]] = {
    "one_call": lambda inputs, layout: tree_gated_delta_rule(inputs, layout.chunks),
    "by_rounds": lambda inputs, layout: linear_attention_by_rounds(
        inputs, layout.runs, chunk_gated_delta_rule, zero_state=inputs.key.new_zeros(H, K, V)
    ),
}


def lay_out(case: Case, *, replay: bool = True) -> tuple[PrefixTree, PackedLayout]:
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    return tree, pack(tree, batch, LayoutNeeds(chunk_size=C, conv_width=1, replay=replay))


def random_inputs(num_tokens: int, dtype: torch.dtype) -> GatedDeltaInputs:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    return GatedDeltaInputs(
        query=randn(H, K) * K**-0.5,
        key=torch.nn.functional.normalize(randn(H, K), dim=-1),
        value=randn(H, V),
        decay=-0.2 * randn(H).abs(),
        beta=randn(H).sigmoid(),
    ).map(lambda x: x.to(dtype).requires_grad_())


def leaves(inputs: GatedDeltaInputs) -> list[Tensor]:
    return [inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta]


@cache
def by_recurrence(case: Case) -> tuple[GatedDeltaInputs, Tensor, Tensor, Sequence[Tensor]]:
    """Inputs, their output by definition, random upstream gradients, and those of the inputs."""
    _, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float64)
    return inputs, *derived(gated_delta_rule_reference(inputs, layout.parent_T), leaves(inputs))


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_token_recurrence(
    case: Case, execution: Callable[[GatedDeltaInputs, PackedLayout], Tensor], replay: bool
):
    _, layout = lay_out(case, replay=replay)
    inputs, expected, upstream, wanted = by_recurrence(case)
    actual = execution(inputs, layout)
    assert_close("output", expected, actual, ratio=1e-13)
    for e, a in zip(wanted, torch.autograd.grad(actual, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


def test_steps_up_to_two():
    """Transitions with negative eigenvalues, as OLMo Hybrid has them."""
    _, layout = lay_out(RICH)
    inputs = random_inputs(layout.num_tokens, torch.float64)
    inputs = replace(inputs, beta=(2 * inputs.beta).detach().requires_grad_())
    assert (inputs.beta > 1).any()
    expected, actual = gated_delta_rule_reference(inputs, layout.parent_T), EXECUTIONS["one_call"](inputs, layout)
    upstream = torch.randn_like(expected)
    assert_close("output", expected, actual, ratio=1e-12)
    wanted = torch.autograd.grad(expected, leaves(inputs), upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


def matmul_ignores_batch_size() -> bool:
    """Whether the library's batched matmul gives a matrix the same bits in any batch, at the sizes used here."""
    a, b = torch.randn(12, C, K), torch.randn(12, K, V)
    return torch.equal(a @ b, torch.cat([a[i : i + 1] @ b[i : i + 1] for i in range(12)]))


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_bit_equal_to_each_path_alone(
    case: Case, execution: Callable[[GatedDeltaInputs, PackedLayout], Tensor]
):
    tree, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree, alone = execution(inputs, layout), each_path_alone(inputs, tree)
    if matmul_ignores_batch_size():
        assert torch.equal(on_tree[torch.from_numpy(flat_to_packed(tree))], alone)
    else:
        assert_close("output", alone, on_tree[torch.from_numpy(flat_to_packed(tree))], ratio=1e-6)


def test_float32_without_replay_is_not():
    """The test above can fail: with chunks counted from branch points, later tokens round differently."""
    tree, layout = lay_out(RICH, replay=False)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = tree_gated_delta_rule(inputs, layout.chunks)[torch.from_numpy(flat_to_packed(tree))]
    assert (on_tree != each_path_alone(inputs, tree)).float().mean() > 0.05


def each_path_alone(inputs: GatedDeltaInputs, tree: PrefixTree) -> Tensor:
    outputs = []
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        output, _ = chunk_gated_delta_rule(
            inputs.map(lambda x, path=path: x[path]),
            cu_seqlens=torch.tensor([0, path.numel()]),
            initial_state=torch.zeros(1, H, K, V),
            chunk_size=C,
        )
        outputs.append(output)
    return torch.cat(outputs)


def test_a_sequence_goes_on_from_its_final_state():
    inputs = random_inputs(200, torch.float64)
    zero = torch.zeros(1, H, K, V, dtype=torch.float64)
    whole, final = chunk_gated_delta_rule(inputs, cu_seqlens=torch.tensor([0, 200]), initial_state=zero, chunk_size=C)
    first, state = chunk_gated_delta_rule(
        inputs.map(lambda x: x[:77]), cu_seqlens=torch.tensor([0, 77]), initial_state=zero, chunk_size=C
    )
    # A second sequence beside it, so that states are matched to sequences.
    second, states = chunk_gated_delta_rule(
        inputs.map(lambda x: torch.cat([x[:5], x[77:]])),
        cu_seqlens=torch.tensor([0, 5, 128]),
        initial_state=torch.cat([zero, state]),
        chunk_size=C,
    )
    assert_close("output", whole, torch.cat([first, second[5:]]), ratio=1e-13)
    assert_close("final state", final[0], states[1], ratio=1e-13)
