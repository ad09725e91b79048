"""The state kernels of linear attention in Triton's interpreter, float32. `test_kernels.py` runs this by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tests.interpreter  # first, and skips without Triton

pytest.importorskip("fla")

from fla.ops.common import chunk_delta_h, chunk_h
from triton.runtime.autotuner import Autotuner

from harts.layers.linear_attention.fla_delta_rule import tree_delta_rule
from harts.layers.linear_attention.fla_simple_gla import (
    Mamba2Rows,
    tree_lightning_rows,
    tree_mamba2_by_fla,
    tree_simple_gla,
)
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.kernels import decay_states, delta_rule
from harts.layers.linear_attention.lightning_reference import lightning_attention_reference
from harts.layers.linear_attention.reference import gated_delta_rule_reference
from harts.layers.linear_attention.ssd import SSDInputs
from harts.layers.linear_attention.ssd_reference import ssd_reference
from harts.testing import assert_close
from harts.tree import tree_from_lcp
from tests.cases import CASES, RICH, Case
from tests.layers.linear_attention.along_tree import TREES, Rows, cumulative_decay, rows_of, tree_of_case, walk

C = 16
SLOW = pytest.mark.slow
SIZES = (1, 2, 16, 16)
"""Key heads, value heads, key width, value width."""
PADDED = (2, 4, 72, 40)
"""Widths that no tile divides, and several tiles of a state."""


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """And take the first of fla's configurations: nothing can be timed."""
    run = Autotuner.run

    def run_first(self: Any, *args: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    tests.interpreter.poison(monkeypatch)
    monkeypatch.setattr(Autotuner, "run", run_first)


class Counter(int):
    """A loop variable of a compiled kernel has this method; in the interpreter it is a plain number."""

    def to(self, dtype: Any) -> Counter:
        del dtype
        return self


@pytest.fixture
def flas_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fla's own state kernels run in the interpreter."""

    def counters(*bounds: Any) -> Any:
        return map(Counter, range(*(bound.__index__() for bound in bounds)))

    for module in (chunk_h, chunk_delta_h):
        monkeypatch.setattr(module, "range", counters, raising=False)


def randn(rows: Rows, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(1, rows.token_R.numel(), *shape, generator=generator)


def each_head(x: Tensor, heads: int) -> Tensor:
    """[1, R, H, K] to [R, heads, K]."""
    return x[0].repeat_interleave(heads // x.shape[2], dim=1)


def state_gradients(rows: Rows, before: list[Tensor], after: list[Tensor], upstream: Tensor, query: Tensor) -> Tensor:
    """[G, HV, K, V]: of the states after every chunk, where each chunk's outputs read `query` of the state before."""
    loss = after[0].sum() * 0
    for (begin, end, _), state in zip(rows.chunks, before, strict=True):
        loss = loss + (upstream[begin:end] * torch.einsum("thk,hkv->thv", query[begin:end], state)).sum()
    gradients = torch.autograd.grad(loss, after, retain_graph=True, materialize_grads=True)
    return torch.stack(gradients)


def check_delta_rule(rows: Rows, sizes: tuple[int, int, int, int], gate: str) -> None:
    heads, value_heads, key_width, value_width = sizes
    heads = value_heads if gate == "gk" else heads
    k, q = (randn(rows, heads, key_width, seed=i, scale=key_width**-0.5) for i in (2, 3))
    w = randn(rows, value_heads, key_width, seed=4, scale=key_width**-0.5)
    u, do, dv = (randn(rows, value_heads, value_width, seed=i) for i in (5, 6, 7))
    g = cumulative_decay(rows, (value_heads,), 0.2) if gate == "g" else None
    gk = cumulative_decay(rows, (value_heads, key_width), 0.2) if gate == "gk" else None
    inputs = delta_rule.DeltaRuleRows(k=k, w=w, g=g, gk=gk)
    h, written = delta_rule.tree_states(inputs, u, launch=rows.launch)
    (alone,) = delta_rule.tree_states(inputs, u, launch=rows.launch, save_values=False)
    dh, total_dv = delta_rule.tree_state_gradients(inputs, q, do, dv, scale=0.3, launch=rows.launch)
    assert torch.equal(h, alone)

    values = u[0].double().requires_grad_()
    keys, queries, known = each_head(k, value_heads).double(), each_head(q, value_heads).double(), w[0].double()
    parts: list[Tensor] = []

    def advance(chunk: slice, state: Tensor) -> Tensor:
        value = values[chunk] - torch.einsum("thk,hkv->thv", known[chunk], state)
        parts.append(value)
        if g is not None:
            decay = g[0, chunk].double()
            value = value * torch.exp2(decay[-1] - decay)[..., None]
            state = state * torch.exp2(decay[-1])[:, None, None]
        if gk is not None:
            state = state * torch.exp2(gk[0, chunk][-1].double())[..., None]
        return state + torch.einsum("thk,thv->hkv", keys[chunk], value)

    zero = torch.zeros(value_heads, key_width, value_width, dtype=torch.float64)
    before, after = walk(rows, zero, advance)
    by_definition = torch.cat(parts)
    assert_close("states", torch.stack(before), h[0].double(), ratio=1e-6)
    assert_close("written values", by_definition, written[0].double(), ratio=1e-6)
    if g is not None:
        queries = queries * torch.exp2(g[0].double())[..., None]
    reads = torch.cat(
        [torch.einsum("thk,hkv->thv", queries[a:b], s) for (a, b, _), s in zip(rows.chunks, before, strict=True)]
    )
    loss = (0.3 * do[0].double() * reads).sum() + (dv[0].double() * by_definition).sum()
    (expected,) = torch.autograd.grad(loss, values, retain_graph=True)
    assert_close("gradients of written values", expected, total_dv[0].double(), ratio=1e-6)
    of_states = torch.stack(torch.autograd.grad(loss, after, materialize_grads=True))
    assert_close("gradients of states", of_states, dh[0].double(), ratio=1e-6)


def check_decays(rows: Rows, sizes: tuple[int, int, int, int], gate: str) -> None:
    heads, value_heads, key_width, value_width = sizes
    k, q = (randn(rows, heads, key_width, seed=i) for i in (2, 3))
    v, do = (randn(rows, value_heads, value_width, seed=i) for i in (4, 5))
    g = cumulative_decay(rows, (value_heads,), 1.0) if gate == "g" else None
    gamma = torch.linspace(-1.4, 0, value_heads) if gate == "gamma" else None
    decay = decay_states.ChunkDecay(g=g, gamma=gamma)
    h = decay_states.tree_states(k, v, decay, launch=rows.launch, dtype=torch.float32)
    dh = decay_states.tree_state_gradients(q, do, decay, scale=0.3, launch=rows.launch, dtype=torch.float32)

    place = torch.cat([torch.arange(1, end - begin + 1) for begin, end, _ in rows.chunks])
    cumulative = torch.zeros(place.numel(), value_heads, dtype=torch.float64)
    cumulative = cumulative if g is None else g[0].double()
    cumulative = cumulative if gamma is None else place[:, None] * gamma.double()
    keys, queries, values = each_head(k, value_heads).double(), each_head(q, value_heads).double(), v[0].double()

    def advance(chunk: slice, state: Tensor) -> Tensor:
        total = cumulative[chunk][-1]
        written = values[chunk] * torch.exp2(total - cumulative[chunk])[..., None]
        return state * torch.exp2(total)[:, None, None] + torch.einsum("thk,thv->hkv", keys[chunk], written)

    zero = torch.zeros(value_heads, key_width, value_width, dtype=torch.float64, requires_grad=True)
    before, after = walk(rows, zero, advance)
    assert_close("states", torch.stack(before), h[0].double(), ratio=1e-6)
    reads = 0.3 * queries * torch.exp2(cumulative)[..., None]
    expected = state_gradients(rows, before, after, do[0].double(), reads)
    assert_close("gradients of states", expected, dh[0].double(), ratio=1e-6)


@pytest.mark.parametrize("check", [check_delta_rule, check_decays])
@pytest.mark.parametrize("name", TREES)
def test_trees(name: str, check: Any):
    check(rows_of(TREES[name](C), C), SIZES, "g")


@pytest.mark.parametrize("check", [check_delta_rule, check_decays])
@pytest.mark.parametrize(
    "case", [c if c is RICH else pytest.param(c, marks=SLOW) for c in CASES[1:]], ids=lambda c: c.name
)
def test_cases(case: Case, check: Any):
    check(rows_of(tree_of_case(case), 64), SIZES, "g")


@pytest.mark.parametrize(
    ("check", "gate"),
    [
        (check_delta_rule, "gk"),
        pytest.param(check_delta_rule, "none", marks=SLOW),
        (check_decays, "gamma"),
        pytest.param(check_decays, "none", marks=SLOW),
    ],
)
@pytest.mark.parametrize("sizes", [SIZES, pytest.param(PADDED, marks=SLOW)], ids=str)
def test_gates(check: Any, gate: str, sizes: tuple[int, int, int, int]):
    check(rows_of(TREES["branches around a boundary"](C), C), sizes, gate)


def chunks_of_path(rows: Rows, path: Tensor, chunk_size: int) -> list[int]:
    """Chunks whose state before them is that of the path: each holds the owner of the path's token there."""
    first = torch.tensor([begin for begin, _, _ in rows.chunks])
    owners = rows.owner_T[path[::chunk_size]]
    return (torch.searchsorted(first, owners, right=True) - 1).tolist()


@pytest.mark.usefixtures("flas_loops")
@pytest.mark.parametrize("gate", ["g", "gamma", "none"])
def test_decayed_states_have_flas_bits(gate: str):
    rows = rows_of(TREES["branches around a boundary"](C), C)
    k, v = (torch.randn(rows.parent_T.numel(), 2, 16) for _ in range(2))
    decay = -torch.rand(rows.parent_T.numel(), 2)
    gamma = torch.tensor([-0.3, -1.1]) if gate == "gamma" else None
    in_runs = [x[rows.token_R][None] for x in (k, v)]
    g = torch.cat([decay[rows.token_R[a:b]].cumsum(0) for a, b, _ in rows.chunks])[None] if gate == "g" else None
    of_tree = decay_states.ChunkDecay(g=g, gamma=gamma)
    h = decay_states.tree_states(*in_runs, of_tree, launch=rows.launch, dtype=torch.float32)
    for path in rows.paths:
        of_path = torch.cat([part.cumsum(0) for part in decay[path].split(C)])[None] if gate == "g" else None
        alone, _ = chunk_h.chunk_fwd_h(k[path][None], v[path][None], g=of_path, g_gamma=gamma, chunk_size=C)
        assert torch.equal(h[0, chunks_of_path(rows, path, C)], alone[0])


@pytest.mark.usefixtures("flas_loops")
@pytest.mark.parametrize("gate", ["g", "gk"])
def test_delta_states_have_flas_bits(gate: str):
    rows = rows_of(TREES["branches around a boundary"](C), C)
    k, w, u = (0.3 * torch.randn(rows.parent_T.numel(), 2, 16) for _ in range(3))
    decay = -torch.rand(rows.parent_T.numel(), *((2, 16) if gate == "gk" else (2,)))
    in_runs = [x[rows.token_R][None] for x in (k, w, u)]
    gates = {"g": None, "gk": None}
    gates[gate] = torch.cat([decay[rows.token_R[a:b]].cumsum(0) for a, b, _ in rows.chunks])[None]
    inputs = delta_rule.DeltaRuleRows(k=in_runs[0], w=in_runs[1], **gates)
    h, values = delta_rule.tree_states(inputs, in_runs[2], launch=rows.launch)
    for path in rows.paths:
        of_path = {gate: torch.cat([part.cumsum(0) for part in decay[path].split(C)])[None]}
        alone, written, _ = chunk_delta_h.chunk_gated_delta_rule_fwd_h(
            k[path][None], w[path][None], u[path][None], chunk_size=C, **of_path
        )
        assert torch.equal(h[0, chunks_of_path(rows, path, C)], alone[0])
        assert torch.equal(values[0, rows.owner_T[path]], written[0])


@pytest.mark.parametrize("check", [check_delta_rule, check_decays])
def test_padded_widths(check: Any):
    check(rows_of(TREES["branches around a boundary"](C), C), PADDED, "g")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_long_chunks():
    check_decays(rows_of(TREES["branches around a boundary"](128), 128), SIZES, "gamma")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
def test_constant_decays_may_be_strong():
    """Rows past the end of a run would decay by 2^360 backwards."""
    rows = rows_of(TREES["lengths around a chunk"](64), 64)
    decay = decay_states.ChunkDecay(gamma=torch.tensor([-6.0]))
    k, v = randn(rows, 1, 16, seed=0), randn(rows, 1, 16, seed=1)
    h = decay_states.tree_states(k, v, decay, launch=rows.launch, dtype=torch.float32)
    assert h.isfinite().all()


def random_ssd(num_tokens: int) -> SSDInputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, generator=generator, dtype=torch.float64)

    return SSDInputs(query=normal(2, 16), key=normal(2, 16), value=normal(4, 16), decay=-0.3 * normal(4).abs())


def compare(expected: Tensor, actual: Tensor, leaves: list[Tensor], tree_leaves: list[Tensor]) -> None:
    """Outputs and gradients of tokens."""
    assert_close("output", expected, actual.double(), ratio=2e-6)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    got = torch.autograd.grad(actual, tree_leaves, upstream.float())
    for nth, (e, a) in enumerate(zip(wanted, got, strict=True)):
        assert_close(f"gradient {nth}", e, a.double(), ratio=4e-6)


def halves(leaves: list[Tensor]) -> list[Tensor]:
    """The same numbers in float32, as leaves."""
    return [x.detach().float().requires_grad_() for x in leaves]


@pytest.mark.parametrize("name", ["branches around a boundary", pytest.param("bushy", marks=SLOW)])
def test_simple_gla_of_a_tree(name: str):
    rows = rows_of(TREES[name](C), C)
    leaves = [*map(Tensor.requires_grad_, _streams(random_ssd(rows.parent_T.numel())))]
    expected = ssd_reference(SSDInputs(**dict(zip(NAMES, leaves, strict=True))), rows.parent_T)
    tree_leaves = halves(leaves)
    inputs = SSDInputs(**dict(zip(NAMES, tree_leaves, strict=True))).map(lambda x: x[rows.token_R])
    actual = tree_simple_gla(inputs, rows.launch, scale=0.5)[rows.owner_T]
    compare(expected * 0.5, actual, leaves, tree_leaves)


NAMES = ("query", "key", "value", "decay")


def _streams(inputs: SSDInputs) -> list[Tensor]:
    return [inputs.query, inputs.key, inputs.value, inputs.decay]


def test_lightning_of_a_tree():
    rows = rows_of(TREES["branches around a boundary"](C), C)
    slope = torch.tensor([0.9, 0.01, 0.3, 0.0], dtype=torch.float64)
    inputs = random_ssd(rows.parent_T.numel())
    leaves = [x.requires_grad_() for x in (inputs.query.repeat(1, 2, 1), inputs.key.repeat(1, 2, 1), inputs.value)]
    expected = lightning_attention_reference(*leaves, slope_H=slope, parent_T=rows.parent_T)
    tree_leaves = halves(leaves)
    actual = tree_lightning_rows(
        *(x[rows.token_R] for x in tree_leaves), slope_H=slope.float(), launch=rows.launch
    )  # fmt: skip
    compare(expected, actual[rows.owner_T], leaves, tree_leaves)


def test_mamba2_of_a_tree():
    """Steps, rates and the skip term take their gradients too."""
    rows = rows_of(TREES["branches around a boundary"](C), C)
    inputs = random_ssd(rows.parent_T.numel())
    rate, skip = -torch.linspace(0.2, 2, 4, dtype=torch.float64), torch.linspace(-1, 1, 4, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (inputs.value, -inputs.decay, rate, inputs.key, inputs.query, skip)]
    x, step, rate, key, query, skip = leaves
    ssd = SSDInputs(query=query, key=key, value=x * step[..., None], decay=rate * step)
    expected = ssd_reference(ssd, rows.parent_T) + skip[:, None] * x
    tree_leaves = halves(leaves)
    x, step, rate, key, query, skip = tree_leaves
    x, step, key, query = (t[rows.token_R] for t in (x, step, key, query))
    taken = Mamba2Rows(x=x, step=step, key=key, query=query)
    actual = tree_mamba2_by_fla(taken, rate_H=rate, skip_H=skip, index=rows.index, launch=rows.launch)
    compare(expected, actual, leaves, tree_leaves)


@pytest.mark.parametrize("gate", ["head", pytest.param("channel", marks=SLOW)])
def test_delta_rule_of_a_tree(gate: str):
    """fla's own kernels around ours, as a model calls them."""
    rows = rows_of(tree_from_lcp([0, 1], [130, 66], [0, 64]), 64)
    generator = torch.Generator().manual_seed(0)
    heads = 2 if gate == "channel" else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows.parent_T.numel(), *shape, generator=generator, dtype=torch.float64)

    decay = -0.1 * normal(*((2, 32) if gate == "channel" else (2,))).abs()
    leaves = [normal(heads, 32), normal(heads, 32), normal(2, 32), decay, normal(2).sigmoid()]
    leaves = [x.requires_grad_() for x in leaves]
    query, key, value, decay, beta = leaves
    query, key = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2 // heads, 1) for x in (query, key))
    inputs = GatedDeltaInputs(query=query * 32**-0.5, key=key, value=value, decay=decay, beta=beta)
    expected = gated_delta_rule_reference(inputs, rows.parent_T)
    tree_leaves = halves(leaves)
    query, key, value, decay, beta = (x[rows.token_R] for x in tree_leaves)
    inputs = GatedDeltaInputs(query=query, key=key, value=value, decay=decay, beta=beta)
    compare(expected, tree_delta_rule(inputs, rows.launch)[rows.owner_T], leaves, tree_leaves)


@pytest.mark.parametrize("size", [128, 24])
def test_chunks_that_fla_has_no_room_for_are_refused(size: int):
    rows = rows_of(TREES["star"](size), size)
    with pytest.raises(ValueError, match=f"chunks of {size} tokens"):
        tree_simple_gla(random_ssd(rows.token_R.numel()), rows.launch)
