"""The GPU kernels in Triton's interpreter, float32. Run by `test_kernel.py` in a process of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.interpreter  # first, and skips without Triton
from harts.data import TrajectoryBatch
from harts.layers.gather import gather_rows
from harts.layers.rows import owned_rows, take_rows
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layers.short_conv.kernel import Tile, tree_short_conv_rows
from harts.layout.conv_index import ConvIndex, conv_index, row_index
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.layout.rounds import RunPlan
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

SLOW = pytest.mark.slow
WIDTHS = (4, 9, 3)
TILES = (Tile(rows=32, channels=8, warps=1), Tile(rows=16, channels=16, warps=1, unroll=2))
NAMES = ["worked_example", pytest.param("branch_in_first_chunk", marks=SLOW), pytest.param("forest", marks=SLOW)]


def layout_of(case: Case, taps: int, *, chunk_size: int = 64) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=chunk_size, conv_width=taps))


def check_conv(parent: Tensor, runs: RunPlan | None, taps: int, index: ConvIndex, *, silu: bool, bias: bool) -> None:
    torch.manual_seed(taps)
    x = torch.randn(parent.numel(), sum(WIDTHS), requires_grad=True)
    weight = torch.randn(sum(WIDTHS), taps, requires_grad=True)
    offset = torch.randn(sum(WIDTHS), requires_grad=True) if bias else None
    leaves = [x, weight, *([offset] if offset is not None else [])]
    ancestors = index.ancestors_TJ.T[1:].long()
    y = tree_short_conv(x, weight, offset, torch.where(ancestors < 0, parent.numel(), ancestors))
    y = torch.nn.functional.silu(y) if silu else y
    token_R = torch.arange(parent.numel()) if runs is None else torch.from_numpy(runs.token_R)
    expected = gather_rows(y, token_R).split(WIDTHS, dim=1)
    activation = "silu" if silu else "none"
    actual = tree_short_conv_rows(x, weight, offset, index=index, widths=WIDTHS, activation=activation, tiles=TILES)
    upstream = [torch.randn_like(piece) for piece in expected]
    for name, e, a in zip("qkv", expected, actual, strict=True):
        assert a.is_contiguous()
        assert_close(name, e, a, ratio=1e-6)
    wanted = torch.autograd.grad([*expected], leaves, upstream)
    for name, e, a in zip(
        ("x", "weight", "bias"), wanted, torch.autograd.grad([*actual], leaves, upstream), strict=False
    ):
        assert_close(f"gradient of {name}", e, a, ratio=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_run_order_with_replays(name: str, monkeypatch: pytest.MonkeyPatch):
    tests.interpreter.poison(monkeypatch)
    layout = layout_of(
        next(case for case in CASES if case.name == name), 4, chunk_size=4 if name == "worked_example" else 64
    )
    index = conv_index(layout.parent_T.numpy(), 4, layout.runs)
    check_conv(layout.parent_T, layout.runs, 4, index, silu=True, bias=name == "forest")


def test_sums_are_rounded_where_pytorch_rounds():
    """In float16, whose casts the interpreter rounds as a GPU does."""
    torch.manual_seed(0)
    x, weight = torch.randn(40, sum(WIDTHS)).half(), torch.randn(sum(WIDTHS), 4).half()
    parent = np.arange(40) - 1
    index = conv_index(parent, 4)
    ancestors = torch.where((above := index.ancestors_TJ.T[1:].long()) < 0, 40, above)
    sums = tree_short_conv(x.float(), weight.float(), None, ancestors)
    different = {}
    for activation, before in (("silu", sums), ("rounded silu", sums.half().float())):
        leaf, at = x.clone().requires_grad_(), before.clone().requires_grad_()
        pieces = tree_short_conv_rows(
            leaf, weight, None, index=index, widths=WIDTHS, activation=activation, tiles=TILES
        )
        different[activation] = (torch.cat(pieces, 1) != torch.nn.functional.silu(before).half()).float().mean().item()
        (through,) = torch.autograd.grad(torch.nn.functional.silu(at).sum(), at)
        (gradient,) = torch.autograd.grad(sum(piece.float().sum() for piece in pieces), leaf)
        reach = torch.zeros(41, sum(WIDTHS))
        for j, above in enumerate([torch.arange(40), *ancestors]):
            reach.index_add_(0, above, through * weight[:, 3 - j].float())
        assert_close(f"gradient of x, {activation}", reach[:40], gradient.float(), ratio=5e-4)
    assert max(different.values()) < 0.01
    assert (torch.nn.functional.silu(sums).half() != torch.nn.functional.silu(sums.half())).float().mean() > 0.1


@pytest.mark.parametrize("taps", [2, 3, 4, 8, *(pytest.param(taps, marks=SLOW) for taps in (5, 6, 7))])
def test_every_width_in_packed_order(taps: int, monkeypatch: pytest.MonkeyPatch):
    tests.interpreter.poison(monkeypatch)
    layout = layout_of(next(case for case in CASES if case.name == "shorter_than_convolution"), taps)
    check_conv(
        layout.parent_T, None, taps, conv_index(layout.parent_T.numpy(), taps), silu=taps % 2 == 0, bias=taps > 4
    )


def test_a_narrower_convolution_than_the_index():
    layout = layout_of(CASES[0], 8)
    index = conv_index(layout.parent_T.numpy(), 8, layout.runs)
    check_conv(layout.parent_T, layout.runs, 3, index, silu=True, bias=False)


@pytest.mark.parametrize("length", [1, 3, 17, *(pytest.param(length, marks=SLOW) for length in (2, 16, 19, 32))])
def test_lengths_around_a_tile_and_the_width(length: int):
    parent = np.arange(length) - 1
    check_conv(torch.from_numpy(parent), None, 4, conv_index(parent, 4), silu=True, bias=True)


def test_a_star_of_many_children():
    """A prompt with twelve rollouts: long lists of descendants and of rows."""
    parent = np.concatenate([np.arange(6) - 1, np.where(np.arange(36) % 3, np.arange(36) + 5, 5)])
    check_conv(torch.from_numpy(parent), None, 4, conv_index(parent, 4), silu=True, bias=False)


def test_frozen_weights_and_strided_input():
    wide = torch.randn(40, 30, requires_grad=True)
    index = conv_index(np.arange(40) - 1, 4)
    weight = torch.randn(16, 4)
    q, k, v = tree_short_conv_rows(
        wide[:, 7:23], weight, None, index=index, widths=WIDTHS, activation="none", tiles=TILES
    )
    ancestors = index.ancestors_TJ.T[1:].long()
    expected = tree_short_conv(wide[:, 7:23], weight, None, torch.where(ancestors < 0, 40, ancestors))
    assert_close("output", expected, torch.cat([q, k, v], dim=1), ratio=1e-6)
    wanted = torch.autograd.grad(expected.square().sum(), wide)
    actual = torch.autograd.grad(sum(piece.square().sum() for piece in (q, k, v)), wide)  # type: ignore[arg-type]
    assert_close("gradient", *wanted, *actual, ratio=2e-6)


def test_what_does_not_fit_is_refused():
    index = conv_index(np.arange(4) - 1, 4)
    x, weight = torch.randn(4, 6), torch.randn(6, 5)
    with pytest.raises(ValueError, match="taps"):
        tree_short_conv_rows(x, weight, None, index=index, widths=(6,), activation="none")
    with pytest.raises(ValueError, match="widths"):
        tree_short_conv_rows(x, weight[:, :4], None, index=index, widths=(3, 2), activation="none")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("worked_example", ()),
        ("shorter_than_convolution", (2, 20)),
        pytest.param("forest", (), marks=SLOW),
        pytest.param("forest", (3, 5), marks=SLOW),
        pytest.param("branch_in_first_chunk", (2, 1030), marks=SLOW),
    ],
)
def test_rows_of_streams(name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    tests.interpreter.poison(monkeypatch)
    layout = layout_of(next(case for case in CASES if case.name == name), 4, chunk_size=4)
    assert layout.runs is not None
    index = row_index(layout.num_tokens, layout.runs)
    assert index.num_shared > 0
    token_R, owner_T = torch.from_numpy(layout.runs.token_R), torch.from_numpy(layout.runs.owner_T)
    source = torch.randn(layout.num_tokens, *shape, requires_grad=True)
    output = torch.randn(token_R.numel(), *shape, requires_grad=True)
    taken, owned = take_rows(source, index), owned_rows(output, index)
    assert torch.equal(taken, source[token_R])
    assert torch.equal(owned, output[owner_T])
    for leaf, expected, actual in ((source, source[token_R], taken), (output, output[owner_T], owned)):
        upstream = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaf, upstream)
        assert_close("gradient", *wanted, *torch.autograd.grad(actual, leaf, upstream), ratio=1e-6)
