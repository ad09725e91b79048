"""The delta rule with a decay per key channel: against the token recurrence, however strong the decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harts.data import TrajectoryBatch
from harts.layers.linear_attention.by_rounds import linear_attention_by_rounds
from harts.layers.linear_attention.channel_decay import SUB_CHUNK, decayed_products
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


def lay_out(case: Case, *, chunk_size: int = C) -> tuple[PrefixTree, PackedLayout]:
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    return tree, pack(tree, batch, LayoutNeeds(chunk_size=chunk_size, conv_width=1))


def mild(randn: Callable[..., Tensor]) -> Tensor:
    return -0.2 * randn(H, K).abs()


def strong(randn: Callable[..., Tensor]) -> Tensor:
    """A state is all but gone after one token: decays of e^-1920 over a chunk."""
    return -30 - randn(H, K).abs()


def mixed(randn: Callable[..., Tensor]) -> Tensor:
    """Some channels and tokens forget all, others keep all: both ends of the range in one product."""
    return torch.where(randn(H, K) > 0.5, -30.0, -0.01) * randn(H, K).abs()


def random_inputs(
    num_tokens: int, dtype: torch.dtype, *, decay: Callable[[Callable[..., Tensor]], Tensor] = mild
) -> GatedDeltaInputs:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    return GatedDeltaInputs(
        query=randn(H, K) * K**-0.5,
        key=torch.nn.functional.normalize(randn(H, K), dim=-1),
        value=randn(H, V),
        decay=decay(randn),
        beta=randn(H).sigmoid(),
    ).map(lambda x: x.to(dtype).requires_grad_())


def leaves(inputs: GatedDeltaInputs) -> list[Tensor]:
    return [inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta]


@cache
def by_recurrence(
    case: Case, decay: Callable[[Callable[..., Tensor]], Tensor]
) -> tuple[GatedDeltaInputs, Tensor, Tensor, Sequence[Tensor]]:
    """Inputs, their output by definition, random upstream gradients, and those of the inputs."""
    _, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float64, decay=decay)
    return inputs, *derived(gated_delta_rule_reference(inputs, layout.parent_T), leaves(inputs))


def assert_equals_the_recurrence(
    case: Case,
    decay: Callable[[Callable[..., Tensor]], Tensor],
    layout: PackedLayout,
    execution: Callable[[GatedDeltaInputs, PackedLayout], Tensor],
) -> None:
    inputs, expected, upstream, wanted = by_recurrence(case, decay)
    actual = execution(inputs, layout)
    assert_close("output", expected, actual, ratio=1e-12)
    got = torch.autograd.grad(actual, leaves(inputs), upstream)
    # Gradients of strong decays all but vanish: each is a difference of two that cancel.
    scale = torch.stack([g.norm() for g in wanted]).norm().item()
    for e, a in zip(wanted, got, strict=True):
        assert_close("gradient", e, a, ratio=1e-12, scale=scale)


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_token_recurrence(case: Case, execution: Callable[[GatedDeltaInputs, PackedLayout], Tensor]):
    assert_equals_the_recurrence(case, mild, lay_out(case)[1], execution)


@pytest.mark.parametrize("decay", [strong, mixed])
@pytest.mark.parametrize("chunk_size", [C, SUB_CHUNK, 5, 40], ids=lambda size: f"chunks_of_{size}")
def test_strong_decays_and_other_chunk_sizes(decay: Callable[[Callable[..., Tensor]], Tensor], chunk_size: int):
    assert_equals_the_recurrence(RICH, decay, lay_out(RICH, chunk_size=chunk_size)[1], EXECUTIONS["one_call"])


@pytest.mark.parametrize("decay", [strong, mixed])
def test_float32_stays_finite(decay: Callable[[Callable[..., Tensor]], Tensor]):
    _, layout = lay_out(RICH)
    inputs = random_inputs(layout.num_tokens, torch.float32, decay=decay)
    output = tree_gated_delta_rule(inputs, layout.chunks)
    expected = gated_delta_rule_reference(inputs, layout.parent_T)
    # Decays are differences of sums of up to C * 60, which float32 holds to about 2e-4.
    assert_close("output", expected, output, ratio=1e-3)
    for gradient in torch.autograd.grad(output.sum(), leaves(inputs)):
        assert gradient.isfinite().all()


def test_a_decay_that_channels_share_is_gated_deltanet():
    _, layout = lay_out(RICH)
    inputs = random_inputs(layout.num_tokens, torch.float64, decay=lambda randn: -0.2 * randn(H).abs())
    expected = tree_gated_delta_rule(inputs, layout.chunks)
    in_every_channel = inputs.map(lambda x: x.unsqueeze(-1).expand(-1, -1, K) if x is inputs.decay else x)
    actual = tree_gated_delta_rule(in_every_channel, layout.chunks)
    assert_close("output", expected, actual, ratio=1e-13)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves(inputs), upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, leaves(inputs), upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_is_each_path_alone(case: Case):
    """To a few units in the last place: a batched product may add up in another order in a larger batch."""
    tree, layout = lay_out(case)
    inputs = random_inputs(layout.num_tokens, torch.float32)
    on_tree = tree_gated_delta_rule(inputs, layout.chunks)[torch.from_numpy(flat_to_packed(tree))]
    alone = []
    for path in torch.from_numpy(flat_to_packed(tree)).split(tree.length_N.tolist()):
        output, _ = chunk_gated_delta_rule(
            inputs.map(lambda x, path=path: x[path]),
            cu_seqlens=torch.tensor([0, path.numel()]),
            initial_state=torch.zeros(1, H, K, V),
            chunk_size=C,
        )
        alone.append(output)
    assert_close("output", torch.cat(alone), on_tree, ratio=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_pairwise_tensor_of_a_whole_chunk_is_built():
    generator = torch.Generator().manual_seed(0)
    left, key, decay = (torch.randn(3, 1, C, 32, generator=generator) for _ in range(3))
    inputs = [x.requires_grad_() for x in (left.unsqueeze(2), key, -decay.abs().cumsum(2))]
    with LargestTensor() as largest:
        decayed_products(*inputs).sum().backward()
    assert largest.elements == 3 * SUB_CHUNK * SUB_CHUNK * 32


def test_gradients_of_the_products_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    length = 2 * SUB_CHUNK + 3

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    decay = -randn(1, 2, length, 2).abs().cumsum(2)
    inputs = [x.requires_grad_() for x in (randn(1, 2, 2, length, 2), randn(1, 2, length, 2), decay)]
    assert torch.autograd.gradcheck(decayed_products, inputs, fast_mode=True)
