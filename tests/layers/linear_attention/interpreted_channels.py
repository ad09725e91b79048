"""Gradients inside chunks with a decay a channel, in Triton's interpreter. `test_kernels.py` runs this by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401 - first, and skips without Triton
from harts.layers.linear_attention.kernels.channel_gradients import ChannelGradients, ChannelRows, channel_gradients
from harts.layers.linear_attention.kernels.chunk_gradients import ChunkStates
from harts.layers.linear_attention.kernels.pair_gradients import pair_gradients
from harts.testing import assert_close
from tests.layers.linear_attention.along_tree import TREES, Rows, rows_of

LN2 = 0.6931471805599453
CASES = {
    "weak decays": (64, 0.05, (2, 2, 32, 32)),
    "strong decays": (64, 8.0, (2, 2, 32, 32)),
    "shared keys and padded widths": (32, 1.0, (1, 2, 72, 40)),
    "one block a chunk": (16, 1.0, (1, 1, 16, 16)),
}
"""Chunk size, strength of decays; key heads, value heads, key width, value width."""
cases = pytest.mark.parametrize(("chunk_size", "strength", "sizes"), CASES.values(), ids=list(CASES))


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(chunk_size: int, strength: float, sizes: tuple[int, int, int, int]) -> tuple[Rows, ChannelRows]:
    """Float64. Decays are natural logarithms here, cumulative within chunks."""
    heads, value_heads, key_width, value_width = sizes
    rows = rows_of(TREES["branches around a boundary"](chunk_size), chunk_size)
    number = rows.token_R.numel()
    steps = -strength * random(number, value_heads, key_width, seed=5).abs()
    g = torch.cat([steps[:, a:b].cumsum(1) for a, b, _ in rows.chunks], 1)
    return rows, ChannelRows(
        q=random(number, heads, key_width, seed=1, scale=key_width**-0.5),
        k=random(number, heads, key_width, seed=2, scale=key_width**-0.5),
        v=random(number, value_heads, value_width, seed=3),
        written=random(number, value_heads, value_width, seed=4),
        g=g,
        beta=random(number, value_heads, seed=6).sigmoid(),
        inverse=random(number, value_heads, chunk_size, seed=7, scale=0.2),
    )


def for_kernels(rows: ChannelRows) -> ChannelRows:
    values = {name: getattr(rows, name).detach().float() for name in ("q", "k", "v", "written", "beta", "inverse")}
    return ChannelRows(g=(rows.g.detach() / LN2).float(), **values)


def leaf(rows: ChannelRows, *names: str) -> list[Tensor]:
    return [getattr(rows, name).requires_grad_() for name in names]


def each_head(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat_interleave(like.shape[2] // x.shape[2], 2)


def sum_heads(x: Tensor, like: Tensor) -> Tensor:
    return x.unflatten(2, (like.shape[2], -1)).sum(3)


@cases
def test_pairs(chunk_size: int, strength: float, sizes: tuple[int, int, int, int]):
    tree, rows = example(chunk_size, strength, sizes)
    number, value_heads = rows.g.shape[1:3]
    place = torch.cat([torch.arange(b - a) for a, b, _ in tree.chunks])
    below = (torch.arange(chunk_size) < place[:, None])[None, :, None]
    of_queries = random(number, value_heads, chunk_size, seed=8) * (
        torch.arange(chunk_size) <= place[:, None]
    ).unsqueeze(1)
    of_keys = random(number, value_heads, chunk_size, seed=9) * below
    before = ChannelGradients(
        q=torch.randn_like(rows.g).float(),
        k=torch.randn_like(rows.g).float(),
        v=rows.v.float(),
        g=torch.randn_like(rows.g).float(),
        beta=torch.randn_like(rows.beta).float(),
        products=of_keys.float(),
    )
    added_to = replace(before, q=before.q.clone(), k=before.k.clone(), g=before.g.clone())
    dq, dk, dbeta, dg = pair_gradients(for_kernels(rows), of_queries.float(), added_to, launch=tree.launch)

    q, k, g, beta = leaf(rows, "q", "k", "g", "beta")
    loss = torch.zeros((), dtype=torch.float64)
    for a, b, _ in tree.chunks:
        keys, decay = each_head(k, g)[0, a:b], g[0, a:b]
        pairwise = torch.exp((decay[:, None] - decay[None]).clamp(max=0))
        queries = torch.einsum("ihk,jhk,ijhk->ihj", each_head(q, g)[0, a:b], keys, pairwise)
        products = torch.einsum("ihk,jhk,ijhk->ihj", keys * beta[0, a:b, :, None], keys, pairwise)
        loss = loss + (of_queries[0, a:b, :, : b - a] * queries).sum()
        loss = loss + (of_keys[0, a:b, :, : b - a] * products).sum()
    expected = torch.autograd.grad(loss, (q, k, beta, g))
    assert_close("queries", expected[0], sum_heads(dq - before.q, q).double(), ratio=5e-5)
    assert_close("keys", expected[1], sum_heads(dk - before.k, k).double(), ratio=5e-5)
    assert_close("write strengths", expected[2], (dbeta - before.beta).double(), ratio=5e-5)
    assert_close("decays", expected[3], (dg - before.g).double(), ratio=5e-5)


@cases
def test_states_and_wy_form(chunk_size: int, strength: float, sizes: tuple[int, int, int, int]):
    tree, rows = example(chunk_size, strength, sizes)
    value_heads, key_width, value_width = rows.g.shape[2], rows.g.shape[3], rows.v.shape[3]
    states = [random(len(tree.chunks), value_heads, key_width, value_width, seed=i) for i in (10, 11)]
    do, du = (random(rows.g.shape[1], value_heads, value_width, seed=i) for i in (12, 13))
    found = channel_gradients(
        for_kernels(rows), do.float(), du.float(), ChunkStates(h=states[0].float(), dh=states[1].float()),
        scale=0.3, launch=tree.launch,
    )  # fmt: skip

    q, k, v, g, beta = leaf(rows, "q", "k", "v", "g", "beta")
    loss = torch.zeros((), dtype=torch.float64)
    of_products = []
    for nth, (a, b, _) in enumerate(tree.chunks):
        h, dh = states[0][0, nth], states[1][0, nth]
        keys, decay = each_head(k, g)[0, a:b], g[0, a:b]
        reads = torch.einsum("thk,hkv->thv", each_head(q, g)[0, a:b] * torch.exp(decay), h)
        loss = loss + 0.3 * (do[0, a:b] * reads).sum()
        after = torch.exp(decay[-1])[..., None] * h
        after = after + torch.einsum("thk,thv->hkv", keys * torch.exp(decay[-1] - decay), rows.written[0, a:b])
        loss = loss + (dh * after).sum()
        inverse = rows.inverse[0, a:b, :, : b - a].clone().requires_grad_()
        strength_b = beta[0, a:b, :, None]
        w = torch.einsum("ihj,jhk->ihk", inverse, strength_b * keys * torch.exp(decay))
        u = torch.einsum("ihj,jhv->ihv", inverse, strength_b * v[0, a:b])
        wy = (du[0, a:b] * (u - torch.einsum("thk,hkv->thv", w, h))).sum()
        (d_inverse,) = torch.autograd.grad(wy, inverse, retain_graph=True)
        # Of a matrix I + A and its inverse B: dA = -B^T dB B^T, below the diagonal.
        b_hij, d_hij = inverse.detach().transpose(0, 1), d_inverse.transpose(0, 1).tril(-1)
        of_products.append(-(b_hij.mT @ d_hij @ b_hij.mT).tril(-1).transpose(0, 1))
        loss = loss + wy
    expected = torch.autograd.grad(loss, (q, k, v, g, beta))
    assert_close("queries", expected[0], sum_heads(found.q, q).double(), ratio=5e-5)
    assert_close("keys", expected[1], sum_heads(found.k, k).double(), ratio=5e-5)
    assert_close("values", expected[2], found.v.double(), ratio=5e-5)
    assert_close("decays", expected[3], found.g.double(), ratio=5e-5)
    assert_close("write strengths", expected[4], found.beta.double(), ratio=5e-5)
    for (a, b, _), products in zip(tree.chunks, of_products, strict=True):
        assert_close("products", products, found.products[0, a:b, :, : b - a].double(), ratio=5e-5)
