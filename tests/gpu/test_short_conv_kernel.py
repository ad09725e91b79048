"""Short convolution and row gathers on a GPU: exactness, determinism, nothing left unwritten, no host stalls."""

# ruff: noqa: E402 - without Triton the imports below fail

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
pytest.importorskip("triton")

from harts.data import TrajectoryBatch
from harts.layers.gather import gather_rows
from harts.layers.rows import owned_rows, take_rows
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layers.short_conv.kernel import Activation, tree_short_conv_rows
from harts.layout.conv_index import ConvIndex, conv_index, row_index
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

CUDA = torch.device("cuda")
WIDTHS = {"aligned": (256, 128, 512), "tails": (40, 24, 5, 300)}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """`torch.empty` is NaN, so whatever a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def layout_of(case: Case, taps: int = 4) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=64, conv_width=taps))


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.float32).to(dtype)


def definition(leaves: list[Tensor], index: ConvIndex, activation: Activation) -> Tensor:
    """In float64, in one piece."""
    x, weight, *bias = leaves
    ancestors_JT = index.ancestors_TJ.T[1:].long()
    ancestors_JT = torch.where(ancestors_JT < 0, x.shape[0], ancestors_JT)
    y = tree_short_conv(x, weight, bias[0] if bias else None, ancestors_JT)
    y = torch.nn.functional.silu(y) if activation == "silu" else y
    return gather_rows(y, index.rows.token_R.long())


def run(
    leaves: list[Tensor], index: ConvIndex, widths: tuple[int, ...], activation: Activation, upstream: Tensor
) -> list[Tensor]:
    x, weight, *bias = leaves
    pieces = tree_short_conv_rows(
        x, weight, bias[0] if bias else None, index=index, widths=widths, activation=activation
    )
    assert all(piece.is_contiguous() for piece in pieces)
    gradients = torch.autograd.grad(pieces, leaves, [piece.contiguous() for piece in upstream.split(widths, dim=1)])
    return [torch.cat(pieces, dim=1), *gradients]


def check(index: ConvIndex, widths: tuple[int, ...], activation: Activation, dtype: torch.dtype, taps: int = 4) -> None:
    """Errors are those of rounding exact results once; runs are equal bit for bit; nothing waits for the GPU."""
    channels = sum(widths)
    leaves = [draw(index.rows.num_tokens, channels, dtype=dtype), draw(channels, taps, dtype=dtype)]
    leaves += [draw(channels, dtype=dtype)] if activation == "silu" else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    upstream = draw(index.rows.num_rows, channels, dtype=dtype)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    y = definition(exact_leaves, index, activation)
    exact = [y, *torch.autograd.grad(y, exact_leaves, upstream.double())]
    first = run(leaves, index, widths, activation, upstream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(leaves, index, widths, activation, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, e, a, again in zip(("output", "x", "weight", "bias"), exact, first, second, strict=False):
        assert torch.equal(a, again), name
        rounding = (e.to(dtype).double() - e).norm() / e.norm() if dtype != torch.float32 else 0.0
        assert_close(name, e, a.double(), ratio=1.05 * float(rounding) + (1e-5 if name in ("weight", "bias") else 2e-6))


@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_run_order_of_every_tree(case: Case, dtype: torch.dtype, widths: tuple[int, ...]):
    layout = layout_of(case)
    check(conv_index(layout.parent_T.numpy(), 4, layout.runs).to(CUDA), widths, "silu", dtype)


def test_sums_are_rounded_where_pytorch_rounds():
    """Without causal-conv1d, a trajectory alone gets the convolution's output in 16 bits and then its activation."""
    x, weight = draw(3000, 768, dtype=torch.bfloat16), draw(768, 4, dtype=torch.bfloat16)
    index = conv_index(np.arange(3000) - 1, 4).to(CUDA)
    alone = torch.nn.functional.conv1d(x.T[None], weight[:, None], padding=3, groups=768)[0, :, :3000].T
    different = {}
    for activation in ("silu", "rounded silu"):
        (y,) = tree_short_conv_rows(x, weight, None, index=index, widths=(768,), activation=activation)
        different[activation] = (y != torch.nn.functional.silu(alone)).float().mean().item()
    assert different["rounded silu"] < 0.002
    assert different["silu"] > 0.1


@pytest.mark.parametrize("taps", range(2, 9))
def test_every_width_of_convolution(taps: int):
    layout = layout_of(next(case for case in CASES if case.name == "depth_beyond_two"), taps)
    index = conv_index(layout.parent_T.numpy(), 8, layout.runs).to(CUDA)
    check(index, WIDTHS["aligned"], "none", torch.float16, taps)


def test_many_children_of_one_token():
    """A prompt with 300 rollouts: each of its last tokens has hundreds of descendants a few steps down."""
    rollout = np.arange(300 * 7)
    parent = np.concatenate([np.arange(50) - 1, np.where(rollout % 7, rollout + 49, 49)])
    check(conv_index(parent, 4).to(CUDA), WIDTHS["aligned"], "silu", torch.bfloat16)


def test_more_than_two_to_the_31_elements():
    """The end of a long sequence depends on its last tokens only; offsets to it need 64 bits."""
    tokens, channels, tail = 270_000, 8192, 64
    index = conv_index(np.arange(tokens) - 1, 4).to(CUDA)
    short = conv_index(np.arange(tail) - 1, 4).to(CUDA)
    x = torch.zeros(tokens, channels, device=CUDA, dtype=torch.bfloat16)
    x[-tail:] = draw(tail, channels, dtype=torch.bfloat16)
    weight = draw(channels, 4, dtype=torch.bfloat16)
    results = []
    for source, each in ((x, index), (x[-tail:].clone(), short)):
        source.requires_grad_()
        (y,) = tree_short_conv_rows(source, weight, None, index=each, widths=(channels,), activation="silu")
        (gradient,) = torch.autograd.grad(y, source, torch.ones_like(y))
        results.append((y[-tail:], gradient[-tail:]))
    for long, alone in zip(*results, strict=True):
        assert torch.equal(long, alone)


@pytest.mark.parametrize("shape", [(), (32,), (32, 128), (3, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_of_streams(dtype: torch.dtype, shape: tuple[int, ...]):
    layout = layout_of(next(case for case in CASES if case.name == "depth_beyond_two"))
    index = row_index(layout.num_tokens, layout.runs).to(CUDA)
    assert index.num_shared > 0
    token_R, owner_T = index.token_R.long(), index.owner_T.long()
    source = draw(index.num_tokens, *shape, dtype=dtype).requires_grad_()
    output = draw(index.num_rows, *shape, dtype=dtype).requires_grad_()
    to_rows, to_tokens = draw(index.num_rows, *shape, dtype=dtype), draw(index.num_tokens, *shape, dtype=dtype)
    runs = []
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            taken, owned = take_rows(source, index), owned_rows(output, index)
            gradients = torch.autograd.grad([taken, owned], [source, output], [to_rows, to_tokens])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append((taken, owned, *gradients))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    taken, owned, for_source, for_output = runs[0]
    assert torch.equal(taken, source[token_R])
    assert torch.equal(owned, output[owner_T])
    # A row is a replay, or its token's own: nothing is added up on the way back.
    assert torch.equal(for_output, torch.zeros_like(output).index_copy(0, owner_T, to_tokens))
    exact = torch.zeros(index.num_tokens, *shape, device=CUDA, dtype=torch.float64)
    exact = exact.index_add(0, token_R, to_rows.double())
    rounding = 0.0 if dtype == torch.float32 else float((exact.to(dtype).double() - exact).norm() / exact.norm())
    assert_close("gradient", exact, for_source.double(), ratio=1.01 * rounding + 1e-6)
