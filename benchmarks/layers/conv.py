"""Short convolution of a whole tree: kernels against the bytes they must move, PyTorch, and fla on a plain sequence.

python -m benchmarks.layers conv             forward, and backward, on three trees
python -m benchmarks.layers conv --sweep     launch shapes, on a chain
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.layers.timing import Row, check, copy_bandwidth, give_up_after, milliseconds, report
from harts.data import Trajectory, TrajectoryBatch
from harts.layers.gather import gather_rows
from harts.layers.short_conv.ancestor_gather import tree_short_conv
from harts.layout.conv_index import ConvIndex, conv_index
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.tree import build_prefix_tree

WIDTHS = (2048, 2048, 4096)
TAPS = 4
FORWARD_SHAPES = [(8, 256, 2), (8, 512, 4), (16, 128, 2), (16, 256, 4), (32, 128, 4), (32, 256, 8), (16, 256, 8)]
"""Rows, channels, warps."""
BACKWARD_SHAPES = [
    *((rows, 256, 2, 2) for rows in (32, 64, 128, 256)),
    *((128, channels, warps, 2) for channels, warps in ((128, 1), (512, 4), (512, 2), (256, 1), (1024, 8))),
    *((128, 256, 2, unroll) for unroll in (1, 4)),
]
"""Tokens, channels, warps, unrolled."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Inputs and the gradient that comes back."""

    name: str
    """Of the tree."""
    layout: PackedLayout
    """On the GPU."""
    index: ConvIndex
    """On the GPU."""
    x_TD: Tensor
    """bfloat16."""
    weight_DJ: Tensor
    """bfloat16."""
    upstream: tuple[Tensor, ...]
    """[R, width] bfloat16 a piece."""

    @property
    def token_R(self) -> Tensor:
        """[R] int64."""
        return self.index.rows.token_R.long()

    def kernel(self, **options: object) -> tuple[Tensor, ...]:
        """The product's path."""
        from harts.layers.short_conv.kernel import tree_short_conv_rows

        return tree_short_conv_rows(
            self.x_TD, self.weight_DJ, None, index=self.index, widths=WIDTHS, activation="silu", **options
        )

    def pytorch(self, *, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The definition, then run order, then one tensor a piece."""
        x_TD = self.x_TD if dtype is None else self.x_TD.to(dtype)
        y_TD = torch.nn.functional.silu(tree_short_conv(x_TD, self.weight_DJ, None, self.layout.ancestors_JT))
        return tuple(piece.contiguous() for piece in gather_rows(y_TD, self.token_R).split(WIDTHS, dim=1))

    def fla(self) -> tuple[Tensor, ...]:
        """fla on one plain sequence of T tokens: no tree, no pieces."""
        from fla.modules.causal_conv1d import causal_conv1d

        return (causal_conv1d(self.x_TD[None], self.weight_DJ, activation="silu")[0],)


def main(arguments: list[str]) -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers conv", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--sweep", action="store_true", help="time launch shapes")
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args(arguments)
    give_up_after(300)
    problems = [problem(name, words) for name, words in trees(options.tokens).items()]
    for each in problems:
        verify(each)
    bandwidth = copy_bandwidth()
    rows = list(sweep(problems[0], bandwidth)) if options.sweep else list(compare(problems, bandwidth))
    report("conv_sweep" if options.sweep else "conv", rows, as_json=options.json)


def trees(tokens: int) -> dict[str, list[np.ndarray]]:
    """A chain, a trunk with a side leaf every 512 tokens, and 64 rollouts of one prompt."""
    rng = np.random.default_rng(0)

    def some(count: int) -> np.ndarray:
        return rng.integers(0, 2**31, count)

    trunk, prompt = some(tokens // 2), some(tokens // 8)
    depths = range(300, trunk.size, 512)
    return {
        "chain": [some(tokens)],
        "caterpillar": [trunk, *(np.concatenate([trunk[:depth], some(512)]) for depth in depths)],
        "64 rollouts": [np.concatenate([prompt, some((tokens - prompt.size) // 64)]) for _ in range(64)],
    }


def problem(name: str, words: list[np.ndarray]) -> Problem:
    """Lay out a tree and draw its inputs."""
    batch = TrajectoryBatch.of([Trajectory.of(word) for word in words])
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=64, conv_width=TAPS))
    index = conv_index(layout.parent_T.numpy(), TAPS, layout.runs).to(torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    draw = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    return Problem(
        name=name,
        layout=layout.to(torch.device("cuda")),
        index=index,
        x_TD=torch.randn(layout.num_tokens, sum(WIDTHS), **draw).requires_grad_(),
        weight_DJ=(torch.randn(sum(WIDTHS), TAPS, **draw) * 0.5).requires_grad_(),
        upstream=tuple(torch.randn(index.rows.num_rows, width, **draw) for width in WIDTHS),
    )


def verify(each: Problem) -> None:
    """Against float32; rounding to bfloat16 alone is off by about 1.7e-3."""
    expected, actual = each.pytorch(dtype=torch.float32), each.kernel()
    leaves = (each.x_TD, each.weight_DJ)
    wanted = torch.autograd.grad(expected, leaves, [piece.float() for piece in each.upstream])
    got = torch.autograd.grad(actual, leaves, each.upstream)
    for e, a in zip((*expected, *wanted), (*actual, *got), strict=True):
        check(f"convolution of {each.name}", e.float(), a, at_most=4e-3)
    for first, second in zip(got, torch.autograd.grad(each.kernel(), leaves, each.upstream), strict=True):
        if not torch.equal(first, second):
            raise SystemExit(f"convolution of {each.name}: gradients differ from run to run. Nothing is timed.")


def compare(problems: list[Problem], bandwidth: float) -> Iterator[Row]:
    """One row a tree and path."""
    for each in problems:
        yield timed(each, "kernel", each.kernel, bandwidth)
        yield timed(each, "PyTorch", each.pytorch, bandwidth)
    yield timed(problems[0], "fla, plain sequence", problems[0].fla, bandwidth)


def sweep(each: Problem, bandwidth: float) -> Iterator[Row]:
    """One row a launch shape."""
    from harts.layers.short_conv.kernel import BACKWARD_TILE, FORWARD_TILE, Tile

    for rows, channels, warps in FORWARD_SHAPES:
        tiles = (Tile(rows=rows, channels=channels, warps=warps), BACKWARD_TILE)
        name = f"forward {rows} x {channels}, {warps} warps"
        yield timed(each, name, lambda tiles=tiles: each.kernel(tiles=tiles), bandwidth)
    for rows, channels, warps, unroll in BACKWARD_SHAPES:
        tiles = (FORWARD_TILE, Tile(rows=rows, channels=channels, warps=warps, unroll=unroll))
        name = f"backward {rows} x {channels}, {warps} warps, {unroll} unrolled"
        yield timed(each, name, lambda tiles=tiles: each.kernel(tiles=tiles), bandwidth)


def timed(each: Problem, name: str, run: Callable[[], tuple[Tensor, ...]], bandwidth: float) -> Row:
    """Times beside the floor: what must be read and written, at the speed of a copy."""
    tokens, rows = each.index.rows.num_tokens, each.index.rows.num_rows
    bytes_a_row = 2 * sum(WIDTHS)
    outputs = run()
    upstream = each.upstream if len(outputs) > 1 else (torch.cat(each.upstream, dim=1)[None],)

    def backward() -> None:
        torch.autograd.grad(outputs, (each.x_TD, each.weight_DJ), upstream, retain_graph=True)

    with torch.no_grad():
        forward_ms = milliseconds(run)
    backward_ms = milliseconds(backward)
    return {
        "tree": each.name,
        "path": name,
        "tokens": tokens,
        "rows": rows,
        "branching": each.index.num_branching,
        "forward ms": forward_ms,
        "forward floor ms": (tokens + rows) * bytes_a_row / bandwidth * 1e3,
        "backward ms": backward_ms,
        "backward floor ms": (2 * tokens + rows) * bytes_a_row / bandwidth * 1e3,
        "copy TB/s": bandwidth / 1e12,
    }
