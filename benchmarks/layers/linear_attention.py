"""Linear attention of trees in one call, against plain calls of fla on as many tokens; forward and backward.

    python -m benchmarks.layers linear --json                          GDN and KDA
    python -m benchmarks.layers linear --shapes FOLDER                 measured trees too (*.jsonl.gz)
    python -m benchmarks.layers linear --kinds lightning,simple-gla,ssd --configurations 6
    python -m benchmarks.layers linear --sweep --kinds gdn,kda         only launch shapes of our kernels
    python -m benchmarks.layers linear --profile                       only how long each kernel takes

Outputs are compared bit by bit with fla's on sampled paths before a kind is timed. Medians of CUDA events, all
executions in turns. `one` is fla's call of one sequence, `packed` that of as many equal sequences as the tree has
trajectories, `tree` ours on rows in run order, `gathers` the same with tokens taken into run order and outputs back;
`layer` has the short convolution too, which writes in run order, and `layer one` fla's before its call; of lightning
attention both have the activation instead, `layer one` PyTorch's. Where fla
refuses its gradient, `one` is our call without branches, and `packed` is left out. `chunks` are those of the tree over
those of one sequence: a chunk costs the same however many of its rows are used. Most of the time goes into fla's
autotuning when nothing is compiled yet: about a minute a kind, and minutes more for calls round by round
(`--no-by-rounds` leaves them out).
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.layers import linear_trees as trees
from benchmarks.layers.linear_kinds import CHUNK_SIZE, KINDS, Kind, Streams
from benchmarks.layers.linear_profile import profiled
from benchmarks.layers.linear_sweep import sweep
from benchmarks.layers.linear_timing import Row, medians, report
from harts.layers.gather import gather_rows
from harts.layers.linear_attention.kernels.activated_rows import activated_rows
from harts.layers.rows import owned_rows, take_rows
from harts.layers.short_conv.kernel import tree_short_conv_rows
from harts.layout.conv_index import ConvIndex, RowIndex, conv_index
from harts.layout.launch import LaunchPlan, launch_index, plan_launch
from harts.layout.rounds import plan_runs
from harts.tree.prefix_tree import PrefixTree

TAPS = 4
COLUMNS = ("one", "packed", "tree", "gathers", "layer one", "layer")
ROUNDS = (1, 8, 32, 64, 128)
BY_ROUNDS = (8, 32)
"""Caterpillars that are run by rounds too."""


def main(arguments: list[str]) -> None:
    """Time the kinds that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--kinds", default="gdn,kda", help=f"of {','.join(KINDS)}")
    parser.add_argument("--shapes", type=Path, help="folder of *.jsonl.gz tree shapes")
    parser.add_argument("--tokens", type=int, default=32_768, help="distinct tokens of a tree")
    parser.add_argument("--sweep", action="store_true", help="only launch shapes of our kernels")
    parser.add_argument("--profile", action="store_true", help="only how long each kernel takes")
    parser.add_argument(
        "--by-rounds",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fla's public function called once a round too, whose autotuning takes minutes more",
    )
    parser.add_argument("--configurations", type=int, help="tune so many of each of fla's kernels at most")
    parser.add_argument("--limit", type=int, default=540, help="seconds after which it gives up")
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(options.limit, exit=True)
    if options.configurations:
        tune_fewer(options.configurations)
    tables: dict[str, list[Row]] = {}
    for name in options.kinds.split(","):
        began = time.perf_counter()
        if options.sweep:
            tables |= sweep(name, options.tokens)
        elif options.profile:
            tables |= profiled(name, options.tokens, forward_backward)
        else:
            tables[name] = []
            for row in times(KINDS[name], options.tokens, options.shapes, by_rounds=options.by_rounds):
                print(name, row, file=sys.stderr, flush=True)  # what a run that is cut short leaves
                tables[name].append(row)
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    name = "linear_sweep" if options.sweep else "linear_profile" if options.profile else "linear"
    report(name, tables, as_json=options.json)


def tune_fewer(most: int) -> None:
    """Keep fla from compiling dozens of configurations of a kernel: those of four warps and large blocks go first."""
    from triton.runtime.autotuner import Autotuner  # pyright: ignore[reportMissingImports]

    prune = Autotuner.prune_configs

    def rank(config: Any) -> tuple[bool, int, int]:
        return config.num_warps != 4, -sum(v for v in config.kwargs.values() if isinstance(v, int)), config.num_stages

    Autotuner.prune_configs = lambda self, options: sorted(prune(self, options), key=rank)[:most]


def times(kind: Kind, num_tokens: int, shapes: Path | None, *, by_rounds: bool) -> Iterator[Row]:
    """A row a tree; caterpillars of `BY_ROUNDS` round by round too, if asked for."""
    check(kind)
    if not kind.public_gradient:
        print("fla's gradient depends on the Triton version here: `one` is our own call without branches")
    for shape, make in (("chain", trees.chain), ("caterpillar", trees.caterpillar)):
        for rounds in ROUNDS:
            if shape == "chain" or rounds > 1:
                slowly = by_rounds and shape == "caterpillar" and rounds in BY_ROUNDS
                yield times_of_tree(kind, shape, make(num_tokens, rounds, CHUNK_SIZE), by_rounds=slowly)
    for name, tree in trees.measured(shapes, num_tokens) if shapes is not None else ():
        yield times_of_tree(kind, name, tree, by_rounds=False)


def check(kind: Kind) -> None:
    """Outputs of a few paths have the bits of the public function."""
    tree = trees.caterpillar(4_096, 16, CHUNK_SIZE)
    plan = plan_launch(tree, CHUNK_SIZE)
    streams = kind.streams(tree.num_tokens)
    with torch.no_grad():
        rows = taken(kind, streams, torch.from_numpy(plan.token_R).cuda())
        output = kind.tree(rows, launch_index(plan).to(torch.device("cuda")))[torch.from_numpy(plan.owner_T).cuda()]
        trunk = torch.arange(int(tree.length_N[0]), device="cuda")
        packed = trunk.numel()
        for nth in range(1, tree.length_N.size):
            length, lcp = int(tree.length_N[nth]), int(tree.lcp_N[nth])
            path = torch.cat([trunk[:lcp], torch.arange(packed, packed + length - lcp, device="cuda")])
            packed += length - lcp
            for tokens in (path, trunk) if nth in (1, 8, 15) else ():
                alone = kind.public(taken(kind, streams, tokens))
                assert torch.equal(alone, output[tokens]), f"path {nth} differs from fla's by itself"


def taken(kind: Kind, streams: Streams, index: Tensor) -> Streams:
    """Rows of the streams of tokens."""
    return {name: x if name in kind.constant else gather_rows(x, index) for name, x in streams.items()}


def forward_backward(kind: Kind, streams: Streams, run: Callable[[Streams], Tensor]) -> Callable[[], object]:
    """Outputs, and the gradients of all streams of tokens."""
    leaves = {name: x.detach().requires_grad_(name not in kind.constant) for name, x in streams.items()}
    wanted = [x for x in leaves.values() if x.requires_grad]
    upstream: list[Tensor] = []

    def work() -> object:
        output = run(leaves)
        if not upstream:
            upstream.append(torch.randn_like(output))
        return torch.autograd.grad(output, wanted, upstream[0])

    return work


def equal_sequences(num_tokens: int, count: int) -> Tensor:
    """[count + 1] int64, on the device."""
    return torch.linspace(0, num_tokens, count + 1, dtype=torch.float64).round().long().cuda()


def times_of_tree(kind: Kind, name: str, tree: PrefixTree, *, by_rounds: bool) -> Row:
    """All executions of one tree."""
    runs, plan = plan_runs(tree, CHUNK_SIZE), plan_launch(tree, CHUNK_SIZE)
    num_tokens, trajectories = tree.num_tokens, int(tree.length_N.size)
    streams, device = kind.streams(num_tokens), torch.device("cuda")
    launch, index = launch_index(plan).to(device), conv_index(parents(tree), TAPS, plan).to(device)
    rows = index.rows

    def gathered(x: Streams) -> Streams:
        return {name: stream if name in kind.constant else take_rows(stream, rows) for name, stream in x.items()}

    in_runs = {n: x.detach() for n, x in gathered(streams).items()}
    work = {
        "tree": forward_backward(kind, in_runs, lambda x: kind.tree(x, launch)),
        "gathers": forward_backward(kind, streams, lambda x: owned_rows(kind.tree(gathered(x), launch), rows)),
    }
    alone = launch_index(plan_launch(trees.chain(num_tokens, 1, CHUNK_SIZE), CHUNK_SIZE)).to(device)
    one = kind.public if kind.public_gradient else partial(kind.tree, launch=alone)
    work["one"] = forward_backward(kind, streams, one)
    if kind.public_gradient:
        cu_seqlens = equal_sequences(num_tokens, trajectories)
        work["packed"] = forward_backward(kind, streams, lambda x: kind.public(x, cu_seqlens))
    if kind.before == "convolution":
        before = mixed(streams)
        work["layer"] = forward_backward(
            kind, before, lambda x: owned_rows(kind.tree(convolved(x, streams, index, gathered), launch), rows)
        )
        work["layer one"] = forward_backward(kind, before, lambda x: one(convolved_by_fla(x, streams)))
    if kind.before == "activation":
        before = mixed_by_head(streams)
        work["layer"] = forward_backward(
            kind, before, lambda x: owned_rows(kind.tree(activated(x, rows, gathered), launch), rows)
        )
        work["layer one"] = forward_backward(kind, before, lambda x: one(activated_by_pytorch(x)))
    if by_rounds and kind.rounds is not None:
        rounds = kind.rounds
        work["by rounds"] = forward_backward(kind, streams, lambda x: rounds(x, runs))
    found = medians(work)
    return {
        **describe(name, tree, plan),
        "rounds": runs.num_rounds,
        "chunks": round(plan.slot_G.size / -(-num_tokens // CHUNK_SIZE), 3),
        **{f"{n} ms": round(found[n], 3) if n in found else "-" for n in COLUMNS},
        "by rounds ms": round(found["by rounds"], 1) if "by rounds" in found else "-",
        "tree / one": round(found["tree"] / found["one"], 3),
        "gathers / one": round(found["gathers"] / found["one"], 3),
        "layer / layer one": round(found["layer"] / found["layer one"], 3) if "layer" in found else "-",
    }


def parents(tree: PrefixTree) -> NDArray[np.int64]:
    """[T] the token before each, -1 at roots."""
    parent_T = np.arange(tree.num_tokens) - 1
    last_S = tree.offset_S + tree.end_S - tree.start_S - 1
    parent_T[tree.offset_S] = np.where(tree.parent_S < 0, -1, last_S[tree.parent_S])
    return parent_T


def mixed(streams: Streams) -> Streams:
    """Queries, keys and values as projected, side by side, with the taps of their convolution; and the rest."""
    side_by_side = torch.cat([streams[name].flatten(1) for name in ("q", "k", "v")], dim=1)
    taps = torch.randn(side_by_side.shape[1], TAPS, device="cuda", dtype=torch.bfloat16) / TAPS
    return {"x": side_by_side, "taps": taps, **{n: x for n, x in streams.items() if n not in ("q", "k", "v")}}


def convolved(x: Streams, like: Streams, index: ConvIndex, gathered: Callable[[Streams], Streams]) -> Streams:
    """Streams in run order from what `mixed` gave."""
    widths = [like[name][0].numel() for name in ("q", "k", "v")]
    pieces = tree_short_conv_rows(x["x"], x["taps"], None, index=index, widths=widths, activation="silu")
    rest = gathered({name: stream for name, stream in x.items() if name not in ("x", "taps")})
    return {n: p.view(-1, *like[n].shape[1:]) for n, p in zip(("q", "k", "v"), pieces, strict=True)} | rest


def convolved_by_fla(x: Streams, like: Streams) -> Streams:
    """The same of one sequence through fla's kernel."""
    output = causal_conv1d(x["x"][None], x["taps"], activation="silu")[0][0]
    pieces = output.split([like[name][0].numel() for name in ("q", "k", "v")], dim=1)
    rest = {name: stream for name, stream in x.items() if name not in ("x", "taps")}
    return {n: p.reshape(-1, *like[n].shape[1:]) for n, p in zip(("q", "k", "v"), pieces, strict=True)} | rest


def mixed_by_head(streams: Streams) -> Streams:
    """Queries, keys and values as projected, those of a head side by side; and the rest."""
    side_by_side = torch.cat([streams[name] for name in ("q", "k", "v")], dim=-1)
    return {"x": side_by_side, **{n: x for n, x in streams.items() if n not in ("q", "k", "v")}}


def activated(x: Streams, rows: RowIndex, gathered: Callable[[Streams], Streams]) -> Streams:
    """Streams in run order from what `mixed_by_head` gave."""
    rest = gathered({name: stream for name, stream in x.items() if name != "x"})
    return dict(zip(("q", "k", "v"), activated_rows(x["x"], rows, "silu"), strict=True)) | rest


def activated_by_pytorch(x: Streams) -> Streams:
    """The same of one sequence, as transformers does it."""
    pieces = torch.nn.functional.silu(x["x"]).chunk(3, dim=-1)
    rest = {name: stream for name, stream in x.items() if name != "x"}
    return dict(zip(("q", "k", "v"), pieces, strict=True)) | rest


def describe(name: str, tree: PrefixTree, plan: LaunchPlan) -> Row:
    """What a row says of its tree."""
    return {
        "tree": name,
        "tokens": tree.num_tokens,
        "trajectories": int(tree.length_N.size),
        "rows": plan.token_R.size,
        "states handed over": plan.num_slots,
    }
