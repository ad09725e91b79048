"""Linear attention of whole trees on a GPU, bfloat16: bits of fla's public functions on each path, exact gradients.

About two minutes on an H200 with nothing compiled yet: one configuration of each of fla's kernels is compiled, where
its autotuning would compile up to 48.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from harts.layers.activation import Activation
from harts.layers.gather import gather_rows
from harts.layers.linear_attention.chunk_core import tree_gated_delta_rule
from harts.layers.linear_attention.inputs import DecayGate, GatedDeltaInputs
from harts.layers.linear_attention.ssd import SSDInputs, tree_ssd
from harts.layout.chunk_index import ChunkIndex, chunk_index
from harts.layout.conv_index import row_index
from harts.layout.launch import LaunchIndex
from harts.layout.rounds import plan_runs
from harts.tree.prefix_tree import PrefixTree
from tests.cases import RICH
from tests.layers.linear_attention.along_tree import TREES, Rows, bushy, deep, lengths, rows_of, star, tree_of_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

C, H, HV, K, V = 64, 2, 4, 128, 128
DEVICE = torch.device("cuda")
FOREST: dict[str, Callable[[], PrefixTree]] = {
    "lengths": partial(lengths, [1, C - 1, C, C + 1, 2 * C, 3 * C - 1]),
    "branches": partial(TREES["branches around a boundary"], C),
    "rich": partial(tree_of_case, RICH),
    "star": partial(star, 2 * C + 3, 40, 70),
    "caterpillar of 64 cuts": partial(deep, 64, C),
    "bushy": partial(bushy, 120, C),
}
Streams = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def one_configuration() -> Iterator[None]:
    """One configuration a kernel, of four warps and large blocks where there is such: packed calls are timed apart from
    plain ones, and other tiles of the same kernel can give other bits."""
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    pytest.importorskip("fla")
    prune = autotuner.prune_configs

    def rank(config: Any) -> tuple[bool, int, int]:
        return config.num_warps != 4, -sum(v for v in config.kwargs.values() if isinstance(v, int)), config.num_stages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner, "prune_configs", lambda self, options: sorted(prune(self, options), key=rank)[:1])
        yield


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of linear attention, in three executions of the same streams (one row a token, or a row of runs)."""

    streams: Callable[[int, torch.Generator], Streams]
    """Given a number of tokens, what it reads: bfloat16 unless the model keeps it in float32."""
    tree: Callable[[Streams, LaunchIndex], Tensor]
    """Ours."""
    public: Callable[[Streams], Tensor]
    """fla's public function on one sequence."""
    definition: Callable[[Streams, ChunkIndex], Tensor]
    """The PyTorch chunk core, in float64."""
    shared: tuple[str, ...] = ()
    """Streams that are not of tokens."""


def delta_streams(num_tokens: int, generator: torch.Generator, *, channels: bool, strongest: float) -> Streams:
    heads = HV if channels else H
    shape = (num_tokens, HV, K) if channels else (num_tokens, HV)
    return {
        "q": normal(generator, num_tokens, heads, K).bfloat16(),
        "k": normal(generator, num_tokens, heads, K).bfloat16(),
        "v": normal(generator, num_tokens, HV, V).bfloat16(),
        "g": -strongest * torch.rand(shape, generator=generator) ** 3,
        "beta": normal(generator, num_tokens, HV).sigmoid().bfloat16(),
    }


def delta_tree(streams: Streams, launch: LaunchIndex, *, bounded: bool = False) -> Tensor:
    from harts.layers.linear_attention.fla_delta_rule import tree_delta_rule

    names = {"query": "q", "key": "k", "value": "v", "decay": "g", "beta": "beta"}
    inputs = GatedDeltaInputs(**{ours: streams[theirs] for ours, theirs in names.items()})
    return tree_delta_rule(inputs, launch, bounded_decay=bounded)


def delta_definition(streams: Streams, chunks: ChunkIndex) -> Tensor:
    q, k = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(HV // x.shape[1], 1)
        for x in (streams["q"], streams["k"])
    )
    inputs = GatedDeltaInputs(
        query=q * K**-0.5, key=k, value=streams["v"], decay=streams["g"], beta=streams["beta"]
    )  # fmt: skip
    return tree_gated_delta_rule(inputs, chunks)


def gdn_public(streams: Streams) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(**{n: x[None] for n, x in streams.items()}, use_qk_l2norm_in_kernel=True)[0][0]


def kda_public(streams: Streams, *, bounded: bool) -> Tensor:
    from fla.ops.kda import chunk_kda

    named = {name: x[None] for name, x in streams.items()}
    return chunk_kda(**named, use_qk_l2norm_in_kernel=True, safe_gate=bounded)[0][0]


def ssd_streams(num_tokens: int, generator: torch.Generator) -> Streams:
    return {
        "q": normal(generator, num_tokens, H, K).bfloat16(),
        "k": normal(generator, num_tokens, H, K).bfloat16(),
        "v": normal(generator, num_tokens, HV, V).bfloat16(),
        "g": -torch.rand(num_tokens, HV, generator=generator),
    }


def simple_gla_tree(streams: Streams, launch: LaunchIndex) -> Tensor:
    from harts.layers.linear_attention.fla_simple_gla import tree_simple_gla

    q, k, v, g = streams.values()
    return tree_simple_gla(SSDInputs(query=q, key=k, value=v, decay=g), launch, scale=K**-0.5)


def simple_gla_public(streams: Streams, **options: Any) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    named = {name: x[None] for name, x in streams.items()}
    named |= {name: named[name].repeat_interleave(HV // named[name].shape[2], 2) for name in ("q", "k")}
    return chunk_simple_gla(**named, **options)[0][0]


def simple_gla_definition(streams: Streams, chunks: ChunkIndex) -> Tensor:
    q, k, v, g = streams.values()
    return tree_ssd(SSDInputs(query=q, key=k, value=v, decay=g), chunks) * K**-0.5


def lightning_streams(num_tokens: int, generator: torch.Generator) -> Streams:
    streams = {name: normal(generator, num_tokens, HV, K).bfloat16() for name in ("q", "k", "v")}
    return {**streams, "slope": torch.tensor([0.9, 0.2, 0.01, 0.0])}


def lightning_tree(streams: Streams, launch: LaunchIndex) -> Tensor:
    from harts.layers.linear_attention.fla_simple_gla import tree_lightning_rows

    return tree_lightning_rows(streams["q"], streams["k"], streams["v"], slope_H=streams["slope"], launch=launch)


def lightning_public(streams: Streams) -> Tensor:
    named = {name: streams[name] for name in ("q", "k", "v")}
    return simple_gla_public(named, g_gamma=-streams["slope"], scale=1.0)


def lightning_definition(streams: Streams, chunks: ChunkIndex) -> Tensor:
    q, k, v, slope = streams.values()
    return tree_ssd(SSDInputs(query=q, key=k, value=v, decay=-slope.expand(q.shape[0], -1)), chunks)


def mamba2_streams(num_tokens: int, generator: torch.Generator) -> Streams:
    return {
        "x": normal(generator, num_tokens, HV, V).bfloat16(),
        "step": torch.nn.functional.softplus(normal(generator, num_tokens, HV)).bfloat16(),
        "key": normal(generator, num_tokens, H, K).bfloat16(),
        "query": normal(generator, num_tokens, H, K).bfloat16(),
        "rate": -torch.linspace(0.05, 1, HV),
        "skip": torch.linspace(-1, 1, HV),
    }


def mamba2_tree(streams: Streams, launch: LaunchIndex) -> Tensor:
    from harts.layers.linear_attention.fla_simple_gla import Mamba2Rows, tree_mamba2_by_fla

    *rows, rate, skip = streams.values()
    index = row_index(rows[0].shape[0]).to(DEVICE)  # as if each row were a token: outputs of all of them
    inputs = Mamba2Rows(**dict(zip(("x", "step", "key", "query"), rows, strict=True)))
    return tree_mamba2_by_fla(inputs, rate_H=rate, skip_H=skip, index=index, launch=launch)


def mamba2_public(streams: Streams) -> Tensor:
    x, step, key, query, rate, skip = streams.values()
    named = {"q": query, "k": key, "v": (x.float() * step.float()[..., None]).bfloat16(), "g": rate * step.float()}
    return simple_gla_public(named, scale=1.0).float() + skip[:, None] * x


def mamba2_definition(streams: Streams, chunks: ChunkIndex) -> Tensor:
    x, step, key, query, rate, skip = streams.values()
    inputs = SSDInputs(query=query, key=key, value=x * step[..., None], decay=rate * step)
    return tree_ssd(inputs, chunks) + skip[:, None] * x


KINDS = {
    "gdn": Kind(
        streams=partial(delta_streams, channels=False, strongest=2.0),
        tree=delta_tree,
        public=gdn_public,
        definition=delta_definition,
    ),
    "kda": Kind(
        streams=partial(delta_streams, channels=True, strongest=2.0),
        tree=delta_tree,
        public=partial(kda_public, bounded=False),
        definition=delta_definition,
    ),
    "bounded kda": Kind(
        streams=partial(delta_streams, channels=True, strongest=4.9),
        tree=partial(delta_tree, bounded=True),
        public=partial(kda_public, bounded=True),
        definition=delta_definition,
    ),
    "simple gla": Kind(
        streams=ssd_streams, tree=simple_gla_tree, public=simple_gla_public, definition=simple_gla_definition
    ),
    "lightning": Kind(
        streams=lightning_streams,
        tree=lightning_tree,
        public=lightning_public,
        definition=lightning_definition,
        shared=("slope",),
    ),
    "mamba2": Kind(
        streams=mamba2_streams,
        tree=mamba2_tree,
        public=mamba2_public,
        definition=mamba2_definition,
        shared=("rate", "skip"),
    ),
}
PUBLIC_GRADIENTS = ("gdn", "kda", "bounded kda")
"""Kinds whose gradient fla gives on Hopper with any Triton. For lightning it gives one, which may be wrong; there, and
where it gives none, paths are run alone by ours."""
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def random_streams(kind: Kind, rows: Rows, seed: int = 0) -> Streams:
    generator = torch.Generator().manual_seed(seed)
    return {name: x.to(DEVICE) for name, x in kind.streams(rows.parent_T.numel(), generator).items()}


def taken(kind: Kind, streams: Streams, index: Tensor) -> Streams:
    """Rows of the streams of tokens."""
    return {name: x if name in kind.shared else gather_rows(x, index) for name, x in streams.items()}


def leaves_of(streams: Streams) -> Streams:
    return {name: x.detach().clone().requires_grad_(name != "slope") for name, x in streams.items()}


@kinds
@pytest.mark.parametrize("name", FOREST)
def test_outputs_have_the_bits_of_each_path_alone(name: str, kind: Kind):
    rows = rows_of(FOREST[name](), C).to(DEVICE)
    streams = random_streams(kind, rows)
    with torch.no_grad():
        output = kind.tree(taken(kind, streams, rows.token_R), rows.launch)[rows.owner_T]
        wrong = [
            (nth, path.numel())
            for nth, path in enumerate(rows.paths)
            if not torch.equal(output[path], kind.public(taken(kind, streams, path)))
        ]
    assert output.isfinite().all()
    assert wrong == [], f"of {len(rows.paths)} paths: number and length of those that differ"


def tree_gradients(kind: Kind, streams: Streams, rows: Rows, upstream: Tensor) -> list[Tensor]:
    leaves = leaves_of(streams)
    output = kind.tree(taken(kind, leaves, rows.token_R), rows.launch)[rows.owner_T]
    return list(torch.autograd.grad(output, [x for x in leaves.values() if x.requires_grad], upstream.to(output)))


def ours_alone(kind: Kind, streams: Streams) -> Tensor:
    """One path through our own call."""
    num_tokens = next(iter(streams.values())).shape[0]
    return kind.tree(streams, rows_of(lengths([num_tokens]), C).launch.to(DEVICE))


def path_gradients(
    run: Callable[[Streams], Tensor], kind: Kind, streams: Streams, *, rows: Rows, upstream: Tensor
) -> list[Tensor]:
    """Each token's upstream gradient enters through the first path that has it; sums over paths in float32."""
    totals = {name: torch.zeros_like(x, dtype=torch.float32) for name, x in streams.items() if name != "slope"}
    seen = 0
    for path in rows.paths:
        leaves = leaves_of(taken(kind, streams, path))
        output = run(leaves)
        share = torch.where((path >= seen)[:, None, None], upstream[path], 0)
        seen = max(seen, int(path.max()) + 1)
        gradients = torch.autograd.grad(output, [leaves[name] for name in totals], share.to(output))
        for name, gradient in zip(totals, gradients, strict=True):
            if name in kind.shared:
                totals[name] += gradient
            else:
                totals[name].index_add_(0, path, gradient.float())
    return list(totals.values())


def errors(expected: list[Tensor], actual: list[Tensor]) -> list[float]:
    """Relative error norms."""
    return [((a.double() - e).norm() / e.norm().clamp(min=1e-30)).item() for e, a in zip(expected, actual, strict=True)]


@kinds
@pytest.mark.parametrize("name", ["branches", "rich", "caterpillar of 64 cuts", "bushy"])
def test_gradients(name: str, kind: Kind):
    tree = FOREST[name]()
    rows = rows_of(tree, C).to(DEVICE)
    streams = random_streams(kind, rows)
    exact = leaves_of({n: x.double() for n, x in streams.items()})
    output = kind.definition(exact, chunk_index(plan_runs(tree, C)).to(DEVICE))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    wanted = list(torch.autograd.grad(output, [x for x in exact.values() if x.requires_grad], upstream.double()))
    ours = errors(wanted, tree_gradients(kind, streams, rows, upstream))
    title = next(n for n, k in KINDS.items() if k is kind)
    print(title, name, "tree", [f"{e:.1e}" for e in ours])  # noqa: T201 - figures for the log of a run
    run = kind.public if title in PUBLIC_GRADIENTS else partial(ours_alone, kind)
    theirs = errors(wanted, path_gradients(run, kind, streams, rows=rows, upstream=upstream))
    print(title, name, "paths", [f"{e:.1e}" for e in theirs])  # noqa: T201
    # Those of decays are differences of large sums; their error is bounded by that of paths alone.
    names = [n for n in streams if n != "slope"]
    assert all(e < 0.05 for n, e in zip(names, ours, strict=True) if n not in ("g", "rate", "step"))
    assert all(tree <= 1.5 * paths + 1e-3 for tree, paths in zip(ours, theirs, strict=True))


@kinds
def test_gradients_are_the_same_in_every_run(kind: Kind):
    rows = rows_of(FOREST["caterpillar of 64 cuts"](), C).to(DEVICE)
    in_runs = taken(kind, random_streams(kind, rows), rows.token_R)
    upstream = torch.randn(rows.token_R.numel(), HV, V, device=DEVICE)
    results = []
    for _ in range(5):
        leaves = leaves_of(in_runs)
        output = kind.tree(leaves, rows.launch)
        gradients = torch.autograd.grad(
            output, [x for n, x in leaves.items() if n not in kind.shared], upstream.to(output)
        )
        results.append([output, *gradients])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@kinds
def test_nothing_waits_for_the_device(kind: Kind):
    rows = rows_of(FOREST["bushy"](), C).to(DEVICE)
    leaves = leaves_of(taken(kind, random_streams(kind, rows), rows.token_R))
    wanted = [x for x in leaves.values() if x.requires_grad]
    upstream = torch.randn(rows.token_R.numel(), HV, V, device=DEVICE).bfloat16()
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            output = kind.tree(leaves, rows.launch)
            torch.autograd.grad(output, wanted, upstream.to(output.dtype))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("title", ["gdn", "simple gla"])
def test_more_runs_than_a_grid_has_rows(title: str):
    """65,535 is the most of a grid's second and third dimension."""
    kind, rollouts = KINDS[title], 65_536 // HV + 600
    tree = star(C + 3, rollouts, 2)
    rows = rows_of(tree, C).to(DEVICE)
    assert rows.launch.num_runs * HV > 65_535
    streams = random_streams(kind, rows)
    leaves = leaves_of(taken(kind, streams, rows.token_R))
    output = kind.tree(leaves, rows.launch)
    tokens = output[rows.owner_T]
    for nth in (0, 1, 77, rollouts // 2, rollouts - 1):
        path = rows.paths[nth]
        assert torch.equal(tokens[path], kind.public(taken(kind, streams, path)))
    gradients = torch.autograd.grad(output, list(leaves.values()), torch.randn_like(output))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient[: C + 3].abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_activated_rows(activation: Activation):
    from harts.layers.linear_attention.kernels.activated_rows import activated_rows
    from harts.layers.rows import take_rows

    rows = rows_of(FOREST["branches"](), C).to(DEVICE)
    mixed = torch.randn(rows.owner_T.numel(), HV, 3 * K, device=DEVICE).bfloat16().requires_grad_()
    activated = torch.nn.functional.silu(mixed) if activation == "silu" else mixed
    expected = take_rows(activated, rows.index).chunk(3, dim=-1)
    actual = activated_rows(mixed, rows.index, activation)
    upstream = [torch.randn_like(piece) for piece in expected]
    wanted, got = (torch.autograd.grad(pieces, mixed, upstream)[0] for pieces in (expected, actual))
    # One rounding instead of two.
    for e, a in [*zip(expected, actual, strict=True), (wanted, got)]:
        assert errors([e], [a])[0] < 4e-3


def test_outputs_of_mamba2_go_back_to_tokens():
    from harts.layers.linear_attention.fla_simple_gla import Mamba2Rows, tree_mamba2_by_fla

    rows, kind = rows_of(FOREST["branches"](), C).to(DEVICE), KINDS["mamba2"]
    streams = random_streams(kind, rows)
    upstream = torch.randn(rows.owner_T.numel(), HV, V, device=DEVICE)
    wanted = tree_gradients(kind, streams, rows, upstream)
    leaves = leaves_of(streams)
    *inputs, rate, skip = taken(kind, leaves, rows.token_R).values()
    inputs = Mamba2Rows(**dict(zip(("x", "step", "key", "query"), inputs, strict=True)))
    output = tree_mamba2_by_fla(inputs, rate_H=rate, skip_H=skip, index=rows.index, launch=rows.launch)
    got = torch.autograd.grad(output, list(leaves.values()), upstream)
    for name, e, a in zip(leaves, wanted, got, strict=True):
        assert torch.equal(e, a), name


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decay_rows(lower_bound: float | None):
    from harts.layers.linear_attention.kernels.decay_rows import decay_rows

    rows = rows_of(FOREST["branches"](), C).to(DEVICE)
    projected = (8 * torch.randn(rows.owner_T.numel(), HV * K, device=DEVICE)).bfloat16()
    leaves = [projected, torch.randn(HV, device=DEVICE), torch.randn(HV * K, device=DEVICE)]
    x_D, log_rate, bias = (leaf.double().requires_grad_() for leaf in leaves)
    x, rate = (x_D + bias).unflatten(-1, (HV, K)), log_rate.exp()[:, None]
    expected = -rate * torch.nn.functional.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
    expected = expected[rows.token_R]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    gate = DecayGate(
        projected_TD=leaves[0], log_rate_H=leaves[1], bias_D=leaves[2], lower_bound=lower_bound, dtype=torch.float32
    )
    actual = decay_rows(gate, rows.index)
    upstream = torch.randn_like(actual)
    assert errors([expected], [actual])[0] < 1e-5
    wanted = torch.autograd.grad(expected, [x_D, log_rate, bias], upstream.double())
    got = torch.autograd.grad(actual, leaves, upstream)
    # The first is rounded to bfloat16.
    for e, a, most in zip(wanted, got, (4e-3, 1e-4, 1e-4), strict=True):
        assert errors([e], [a])[0] < most
