"""Tree attention on a Hopper GPU, against dense FlashAttention-4 in the same run.

    python -m benchmarks.layers attention --json                  trees of a given form, all head widths
    python -m benchmarks.layers attention --shapes FOLDER         real trees too, in both orders of siblings
    python -m benchmarks.layers attention --widths 128 --sweep    candidates for tiles as well
    python -m benchmarks.layers attention --widths 128 --windows 1024    through windows as well, against dense with one

TFLOP/s count visible pairs of a query and a key only: 2 x pairs x query heads x (key width + value width) for a
forward pass, 2.5 times that for a backward pass. Times are medians of interleaved repeats, each with the device as warm
as the same passes leave it. Outputs and gradients are compared with float32 first; what differs has no time.
"""

# Installed with the `gpu` extra only.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.layers.gpu import gpu_provenance
from benchmarks.layers.trees import Tree, forms, recorded
from harts.layout.attention_blocks import AttentionBlocks, attention_blocks

TOKENS = 32_768
QUEUEING_CYCLES = 60_000_000
"""About 30 ms."""
WARMING = 2
"""Passes before the one that is timed. An H200 slows down at its power limit, the more the longer it is there: what is
timed after a rest or something shorter seems to be up to a tenth faster."""
RATIO = 5e-3
"""Largest relative error of outputs and gradients in bfloat16; right kernels have 2e-3 to 3e-3."""
LIMIT_SECONDS = 570
"""After which a hanging run ends itself and says where it was."""
ERRORS = (RuntimeError, ValueError, AssertionError)
"""What a tile that does not compile or fit raises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of one attention layer."""

    key_width: int
    value_width: int
    query_heads: int
    key_heads: int

    def flops(self, pairs: int) -> float:
        """Of a forward pass."""
        return 2.0 * pairs * self.query_heads * (self.key_width + self.value_width)


HEADS = {
    "256": Heads(key_width=256, value_width=256, query_heads=16, key_heads=4),
    "128": Heads(key_width=128, value_width=128, query_heads=32, key_heads=8),
    "mla": Heads(key_width=192, value_width=128, query_heads=16, key_heads=16),
}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contender:
    """Something to time."""

    kernel: str
    """Name in the table."""
    tree: Tree
    """What it attends over."""
    forward: Callable[[list[Tensor]], Tensor]
    """[query, key, value] to [query heads, T, V]."""


def main(arguments: list[str]) -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--widths", nargs="+", choices=HEADS, default=list(HEADS), help="head widths")
    parser.add_argument("--shapes", type=Path, help="folder of recorded shapes (*.jsonl.gz)")
    parser.add_argument("--sweep", action="store_true", help="candidates for tiles too")
    parser.add_argument(
        "--flex", nargs="*", choices=HEADS, default=["128"], help="widths with FlexAttention beside on a few trees"
    )
    parser.add_argument("--windows", nargs="+", type=int, default=[], help="positions that a query sees")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    trees = [*forms(TOKENS), *(recorded(options.shapes, TOKENS) if options.shapes else ())]
    rows: list[Row] = []
    for name in options.widths:
        heads = HEADS[name]
        contenders = list(_contenders(heads, trees, flex=name in options.flex))
        if options.sweep:
            contenders += _candidates(heads, [tree for tree in trees if tree.name in _SWEPT])
        rows += measure(name, contenders, repeats=options.repeats)
        for window in options.windows:
            windowed = [tree.through(window) for tree in trees if tree.name in _WINDOWED]
            rows += measure(name, list(_contenders(heads, windowed, window=window)), repeats=options.repeats)
        _write({"rows": rows, **gpu_provenance()})
    faulthandler.cancel_dump_traceback_later()
    if options.json:
        print(json.dumps({"rows": rows, **gpu_provenance()}))


_WINDOWED = ("prefix 8192 + 12 x 2048", "prefix 8192 + 96 x 256", "caterpillar 512, trunk first")
_SWEPT = ("prefix 8192 + 12 x 2048", "prefix 8192 + 192 x 128", "caterpillar 128, leaf first")


def measure(name: str, contenders: list[Contender], *, repeats: int) -> list[Row]:
    """Check every contender, then time those that are right, one after the other and all again.

    Args:
        name: Key of HEADS.
        contenders: The first one is dense attention, to which the others are compared.
        repeats: Of each.
    """
    heads = HEADS[name]
    errors = _check(heads, contenders)
    right = [c for c, error in zip(contenders, errors, strict=True) if isinstance(error, float) and error <= RATIO]
    times: dict[int, list[tuple[float, float]]] = {id(c): [] for c in right}
    inputs = {c.tree.num_tokens: _inputs(heads, c.tree.num_tokens) for c in right}
    for _ in range(repeats):
        for contender in right:
            times[id(contender)].append(_time(contender, inputs[contender.tree.num_tokens]))
    rows: list[Row] = []
    for contender, error in zip(contenders, errors, strict=True):
        row: Row = {"heads": name, "tree": contender.tree.name, "kernel": contender.kernel, "error": error}
        if id(contender) in times:
            forward, backward = (statistics.median(part) for part in zip(*times[id(contender)], strict=True))
            flops = heads.flops(contender.tree.pairs) / 1e9
            row |= {"forward ms": forward, "backward ms": backward, "forward TFLOP/s": flops / forward}
            row |= {"backward TFLOP/s": 2.5 * flops / backward, "both TFLOP/s": 3.5 * flops / (forward + backward)}
            dense = rows[0] if rows else row
            if "both TFLOP/s" in dense:
                passes = ("forward", "backward", "both")
                row |= {f"{p} / dense": row[f"{p} TFLOP/s"] / dense[f"{p} TFLOP/s"] for p in passes}
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _contenders(
    heads: Heads, trees: list[Tree], *, flex: bool = False, window: int | None = None
) -> Iterator[Contender]:
    """Dense attention, then every tree with the product's tiles."""
    from flash_attn.cute.interface import flash_attn_func

    from harts.layers.tree_attention.flash4 import tiles_for

    path = Tree.of("one path", np.arange(TOKENS)).through(window)
    options = {"causal": True} if window is None else {"window_size": (window - 1, 0)}

    def dense(inputs: list[Tensor]) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in inputs)
        return flash_attn_func(query, key, value, softmax_scale=_scale(heads), **options)[0][0].transpose(0, 1)

    yield Contender(kernel="dense flash4", tree=path, forward=dense)
    for tree in trees:
        yield _flash4(heads, tree, tiles_for(heads.key_width, heads.value_width), "flash4")
    for number, tree in enumerate(trees if flex else ()):
        if number == 0 or tree.name.endswith("largest first"):
            yield _flex(heads, tree)


def _flash4(heads: Heads, tree: Tree, tiles: Any, name: str) -> Contender:
    from harts.layers.tree_attention.flash4 import Flash4Call, attend

    call = Flash4Call(blocks=_blocks(tree, tiles.forward, tiles.backward_block), scale=_scale(heads), tiles=tiles)
    return Contender(kernel=name, tree=tree, forward=lambda inputs: attend(*inputs, call=call))


def _flex(heads: Heads, tree: Tree) -> Contender:
    from harts.layers.tree_attention.flex import BLOCK_SIZE, block_mask, tree_attention_flex

    mask = block_mask(_blocks(tree, BLOCK_SIZE, BLOCK_SIZE))
    return Contender(
        kernel="flex",
        tree=tree,
        forward=lambda inputs: tree_attention_flex(*inputs, mask=mask, scale=_scale(heads)),
    )


def _candidates(heads: Heads, trees: list[Tree]) -> Iterator[Contender]:
    """Other tiles, one change at a time. All of them compile for sm_90 without large spills."""
    from benchmarks.layers.attention_tiles import variants

    for name, tiles in variants(heads.key_width, heads.value_width).items():
        for tree in trees:
            yield _flash4(heads, tree, tiles, name)


def _blocks(tree: Tree, forward: tuple[int, int], backward: tuple[int, int]) -> AttentionBlocks:
    blocks = attention_blocks(
        tree.subtree_end_T, tree.position_T, forward_size=forward, backward_size=backward, window=tree.window
    )
    return blocks.to(torch.device("cuda"))


def _scale(heads: Heads) -> float:
    return heads.key_width**-0.5


def _inputs(heads: Heads, tokens: int) -> list[Tensor]:
    """Query, key and value, views of [T, heads, width] as modules make them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    sizes = (
        (heads.query_heads, heads.key_width),
        (heads.key_heads, heads.key_width),
        (heads.key_heads, heads.value_width),
    )
    return [
        torch.randn(tokens, count, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        .transpose(0, 1)
        .requires_grad_()
        for count, width in sizes
    ]


def _upstream(output: Tensor) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shape = output.transpose(0, 1).shape
    return torch.randn(shape, device="cuda", dtype=output.dtype, generator=generator).transpose(0, 1)


def _time(contender: Contender, inputs: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward pass."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    upstream = _upstream(inputs[0][..., : inputs[2].shape[-1]])
    torch.cuda.synchronize()
    # The device waits until everything is queued, as in a step: what the host takes for a launch is not timed.
    torch.cuda._sleep(QUEUEING_CYCLES)
    for _ in range(WARMING + 1):
        events[0].record()
        output = contender.forward(inputs)
        events[1].record()
        torch.autograd.grad(output, inputs, upstream)
        events[2].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])


def _check(heads: Heads, contenders: list[Contender]) -> list[float | str]:
    """The largest relative error of output and gradients of each, or why it did not run; compiles on the way."""
    errors: list[float | str] = []
    references: dict[str, list[Tensor]] = {}
    for contender in contenders:
        inputs = _inputs(heads, contender.tree.num_tokens)
        try:
            output = contender.forward(inputs)
            upstream = _upstream(output)
            results = [output.detach(), *torch.autograd.grad(output, inputs, upstream)]
        except ERRORS as error:
            errors.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        if contender.tree.name not in references:
            references[contender.tree.name] = _reference(heads, contender.tree, inputs, upstream)
        groups = heads.query_heads // heads.key_heads
        compared = zip(references[contender.tree.name], results, (groups, groups, 1, 1), strict=True)
        finite = all(bool(torch.isfinite(x).all()) for x in results)
        # Of the last key head and its queries; the others run the same code.
        worst = max(float((e - a[-n:].float()).norm() / e.norm()) for e, a, n in compared)
        errors.append(worst if finite else "not finite")
    return errors


@torch.no_grad()
def _reference(heads: Heads, tree: Tree, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output and gradients of the last key head and its queries in float32, block of queries by block of queries."""
    groups, scale, size = heads.query_heads // heads.key_heads, _scale(heads), 512
    query, grad_output = inputs[0][-groups:].float(), upstream[-groups:].float()
    key, value = inputs[1][-1].float(), inputs[2][-1].float()
    end = torch.from_numpy(tree.subtree_end_T).cuda()
    token = torch.arange(tree.num_tokens, device="cuda")
    position = torch.from_numpy(tree.position_T).cuda()
    output, grad_query = torch.empty_like(grad_output), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, tree.num_tokens, size):
        rows = slice(start, start + size)
        mask = (token[None] <= token[rows, None]) & (token[rows, None] < end[None])
        if tree.window is not None:
            mask &= position[rows, None] - position[None] < tree.window
        scores = (query[:, rows] @ key.T * scale).masked_fill_(~mask, float("-inf"))
        probabilities = scores.softmax(-1)
        output[:, rows] = probabilities @ value
        grad_value += torch.einsum("gqk,gqv->kv", probabilities, grad_output[:, rows])
        delta = (output[:, rows] * grad_output[:, rows]).sum(-1, keepdim=True)
        grad_scores = probabilities * (grad_output[:, rows] @ value.T - delta) * scale
        grad_query[:, rows] = grad_scores @ key
        grad_key += torch.einsum("gqk,gqd->kd", grad_scores, query[:, rows])
    return [output, grad_query, grad_key[None], grad_value[None]]


def _line(row: Row) -> str:
    names = f"{row['heads']:>4} {row['kernel']:<32} {row['tree']:<40}"
    if "both TFLOP/s" not in row:
        error = row["error"]
        return f"{names} no time: {error if isinstance(error, str) else f'error {error:.1e}'}"
    passes = " | ".join(
        f"{p} {row[f'{p} TFLOP/s']:6.1f} ({row.get(f'{p} / dense', float('nan')):.3f})"
        for p in ("forward", "backward", "both")
    )
    return f"{names} {passes}"


def _write(results: Row) -> None:
    """To $OUT if there is one."""
    if folder := os.environ.get("OUT"):
        Path(folder, "attention.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
