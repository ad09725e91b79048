"""One call a round, whatever the recurrence: calls, hand-offs, gradients, and public signatures of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.layers.linear_attention.by_rounds import PublicKernel, linear_attention_by_rounds
from harts.layers.linear_attention.chunk_core import chunk_gated_delta_rule, tree_gated_delta_rule
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layout import rounds
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.layout.schedule import earliest_rounds, latest_rounds
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, RICH, Case, trajectories_of

C, H, K, V = 64, 2, 8, 12


def lay_out(case: Case, chunk_size: int = C) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=chunk_size, conv_width=1))


def counting_kernel(calls: list[list[int]]) -> PublicKernel[GatedDeltaInputs]:
    """A kernel as libraries offer it: a batch dimension of one, short names, chunks of its own size."""

    def chunk_delta_rule(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, Tensor]:
        calls.append(cu_seqlens.tolist())
        assert all(x.shape[0] == 1 and x.shape[1] == cu_seqlens[-1] for x in (q, k, v, g, beta))
        assert initial_state.shape == (cu_seqlens.numel() - 1, H, K, V)
        inputs = GatedDeltaInputs(query=q[0], key=k[0], value=v[0], decay=g[0], beta=beta[0])
        output, final_state = chunk_gated_delta_rule(
            inputs, cu_seqlens=cu_seqlens, initial_state=initial_state, chunk_size=C
        )
        return output[None], final_state

    return PublicKernel(
        function=chunk_delta_rule,
        arguments=lambda x: {"q": x.query, "k": x.key, "v": x.value, "g": x.decay, "beta": x.beta},
        chunk_size=C,
    )


def random_inputs(num_tokens: int) -> GatedDeltaInputs:
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator)
    return GatedDeltaInputs(
        query=randn(num_tokens, H, K),
        key=torch.nn.functional.normalize(randn(num_tokens, H, K), dim=-1),
        value=randn(num_tokens, H, V),
        decay=-0.2 * randn(num_tokens, H).abs(),
        beta=randn(num_tokens, H).sigmoid(),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_public_kernel_is_called_once_a_round(case: Case):
    layout = lay_out(case)
    assert layout.runs is not None
    inputs, calls = random_inputs(layout.num_tokens), []
    output = linear_attention_by_rounds(inputs, layout.runs, counting_kernel(calls), zero_state=torch.zeros(H, K, V))
    assert len(calls) == layout.runs.num_rounds
    assert sum(len(call) - 1 for call in calls) == layout.runs.run_parent.size
    assert sum(call[-1] for call in calls) == layout.runs.token_R.size
    if case is RICH:
        assert len(calls) > 2
    assert_close("output", tree_gated_delta_rule(inputs, layout.chunks), output, ratio=1e-6)


def test_a_kernel_with_chunks_of_another_size_is_refused():
    layout = lay_out(RICH, chunk_size=32)
    assert layout.runs is not None
    with pytest.raises(ValueError, match="chunks of 32 tokens, but the kernel's have 64"):
        linear_attention_by_rounds(
            random_inputs(layout.num_tokens),
            layout.runs,
            counting_kernel([]),
            zero_state=torch.zeros(H, K, V),
        )


@dataclass(frozen=True)
class DecayedSum:
    """`state = decay * parent's state + value`, and the output is the state: a recurrence that no model has."""

    value: Tensor
    decay: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> DecayedSum:
        return DecayedSum(function(self.value), function(self.decay))


def decayed_sums(
    inputs: DecayedSum, /, *, cu_seqlens: Tensor, initial_state: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    assert chunk_size > 0
    outputs, final_states = [], []
    for i, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        state = initial_state[i]
        for row in range(begin, end):
            state = inputs.decay[row] * state + inputs.value[row]
            outputs.append(state)
        final_states.append(state)
    return torch.stack(outputs), torch.stack(final_states)


def along_parents(inputs: DecayedSum, parent_T: Tensor) -> Tensor:
    states: list[Tensor] = []
    for token, parent in enumerate(parent_T.tolist()):
        before = states[parent] if parent >= 0 else torch.zeros_like(inputs.value[token])
        states.append(inputs.decay[token] * before + inputs.value[token])
    return torch.stack(states)


@pytest.mark.parametrize("late", [False, True], ids=["as planned", "as late as possible"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_recurrence_and_any_schedule(case: Case, late: bool, monkeypatch: pytest.MonkeyPatch):
    """States that wait for several rounds, and their gradients, arrive where they belong."""
    if late:
        monkeypatch.setattr(
            rounds, "schedule", lambda parent, _: latest_rounds(parent, earliest_rounds(parent).max() + 1)
        )
    layout = lay_out(case, chunk_size=16)
    runs = layout.runs
    assert runs is not None
    parents = runs.run_parent >= 0
    waited = runs.run_round[parents] - runs.run_round[runs.run_parent[parents]] - 1
    assert not (late and case is RICH) or waited.max() > 1
    generator = torch.Generator().manual_seed(0)
    inputs = DecayedSum(
        torch.randn(layout.num_tokens, 3, generator=generator, dtype=torch.float64).requires_grad_(),
        torch.rand(layout.num_tokens, 3, generator=generator, dtype=torch.float64).requires_grad_(),
    )
    expected = along_parents(inputs, layout.parent_T)
    actual = linear_attention_by_rounds(inputs, runs, decayed_sums, zero_state=torch.zeros(3, dtype=torch.float64))
    assert torch.equal(expected, actual)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, [inputs.value, inputs.decay], upstream)
    for e, a in zip(wanted, torch.autograd.grad(actual, [inputs.value, inputs.decay], upstream), strict=True):
        assert_close("gradient", e, a, ratio=1e-14)
