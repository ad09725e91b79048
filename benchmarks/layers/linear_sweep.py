"""Launch shapes of our kernels, each alone: those that hand states along a tree, and gradients inside chunks."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.layers import linear_trees as trees
from benchmarks.layers.linear_kinds import CHUNK_SIZE, KINDS, Streams
from benchmarks.layers.linear_timing import Row, medians
from harts.layers.linear_attention.kernels import (
    channel_gradients,
    chunk_gradients,
    decay_states,
    delta_rule,
    pair_gradients,
    wy_gradients,
)
from harts.layers.linear_attention.kernels.queue import LaunchShape
from harts.layout.launch import LaunchIndex, launch_index, plan_launch

BLOCKS = ((32, 2), (32, 4), (64, 4), (64, 8), (128, 8))
"""Values of a block and warps: a thread holds 64 or 32 numbers of a state of 128 keys."""
SQUARES = ((64, 64, 4), (64, 32, 4), (128, 64, 4), (128, 64, 8), (64, 128, 4), (32, 32, 2))
"""Keys and values of a tile and warps, for states that are cut both ways."""
STAGES = (1, 2, 3, 4)


def sweep(name: str, num_tokens: int) -> dict[str, list[Row]]:
    """Milliseconds of both directions by launch shape, the best first, on a caterpillar and a chain."""
    launches = {
        shape: launch_index(plan_launch(make(num_tokens, rounds, CHUNK_SIZE), CHUNK_SIZE)).to(torch.device("cuda"))
        for shape, make, rounds in (("caterpillar", trees.caterpillar, 32), ("chain", trees.chain, 8))
    }
    tables = {}
    for direction in ("FORWARD", "BACKWARD"):
        rows = list(_shapes(name, direction, launches))
        rows.sort(key=lambda row: float(str(row["caterpillar ms"])) + float(str(row["chain ms"])))
        tables[f"{name} {direction.lower()}"] = rows
        print(name, direction, rows[0], flush=True)
    if name == "gdn":
        chunk_work = {shape: _chunk_work(launch) for shape, launch in launches.items()}
        tables["chunk_gradients"] = list(_gradient_shapes(chunk_gradients, chunk_work, (64, 128)))
        wy_work = {shape: _wy_work(launch) for shape, launch in launches.items()}
        tables["wy_gradients"] = list(_gradient_shapes(wy_gradients, wy_work, (None,)))
    if name == "kda":
        channel_work = {shape: _channel_work(launch) for shape, launch in launches.items()}
        tables["channel_gradients"] = list(_gradient_shapes(channel_gradients, channel_work, (32, 64, 128)))
        tables["pair_gradients"] = list(_pair_shapes(launches))
    return tables


def _gradient_shapes(
    module: ModuleType, work: dict[str, Callable[[], object]], blocks_k: tuple[int | None, ...]
) -> Iterator[Row]:
    for block_k, block_v, warps, stages in product(blocks_k, (32, 64, 128), (4, 8), (1, 2, 3)):
        shape = LaunchShape(block_k=block_k, block_v=block_v, num_warps=warps, num_stages=stages)
        with patch.object(module, "SHAPE", shape):
            try:
                found = medians(work, repeats=7)
            except OutOfResources:
                continue
        yield {
            "tile": f"{block_k or 128}x{block_v}",
            "warps": warps,
            "stages": stages,
            **_times(found),
        }


def _times(found: dict[str, float]) -> Row:
    return {f"{tree} ms": round(ms, 3) for tree, ms in found.items()}


def _pair_shapes(launches: dict[str, LaunchIndex]) -> Iterator[Row]:
    work = {shape: _pair_work(launch) for shape, launch in launches.items()}
    for block_k, warps, stages in product((32, 64, 128), (1, 2, 4), (1, 2, 3)):
        with patch.multiple(pair_gradients, BLOCK_K=block_k, NUM_WARPS=warps, NUM_STAGES=stages):
            found = medians(work, repeats=7)
        yield {
            "channels": block_k,
            "warps": warps,
            "stages": stages,
            **_times(found),
        }


def _channel_rows(num_rows: int) -> channel_gradients.ChannelRows:
    keys = {name: _halves(num_rows, 32, 128) / 12 for name in ("q", "k")}
    return channel_gradients.ChannelRows(
        **keys,
        v=_halves(num_rows, 32, 128),
        written=_halves(num_rows, 32, 128),
        g=-torch.rand(1, num_rows, 32, 128, device="cuda"),
        beta=_halves(num_rows, 32).sigmoid(),
        inverse=_halves(num_rows, 32, CHUNK_SIZE) / 10,
    )


def _channel_work(launch: LaunchIndex) -> Callable[[], channel_gradients.ChannelGradients]:
    num_rows, chunks = int(launch.cu_seqlens[-1]), launch.slot_G.numel()
    rows = _channel_rows(num_rows)
    do, du = _halves(num_rows, 32, 128), _halves(num_rows, 32, 128)
    states = chunk_gradients.ChunkStates(h=_halves(chunks, 32, 128, 128), dh=_halves(chunks, 32, 128, 128))
    return lambda: channel_gradients.channel_gradients(rows, do, du, states, scale=0.1, launch=launch)


def _pair_work(launch: LaunchIndex) -> Callable[[], object]:
    num_rows = int(launch.cu_seqlens[-1])
    rows, found = _channel_rows(num_rows), _channel_work(launch)()
    products = torch.randn(1, num_rows, 32, CHUNK_SIZE, device="cuda")
    return lambda: pair_gradients.pair_gradients(rows, products, found, launch=launch)


def _halves(*shape: int) -> Tensor:
    return torch.randn(1, *shape, device="cuda").bfloat16()


def _chunk_work(launch: LaunchIndex) -> Callable[[], object]:
    num_rows, chunks = int(launch.cu_seqlens[-1]), launch.slot_G.numel()
    values = {name: _halves(num_rows, 32, 128) for name in ("v", "do", "dv")}
    keys = {name: _halves(num_rows, 16, 128) for name in ("q", "k")}
    rows = chunk_gradients.ChunkRows(**keys, **values, g=-torch.rand(1, num_rows, 32, device="cuda"))
    states = chunk_gradients.ChunkStates(h=_halves(chunks, 32, 128, 128), dh=_halves(chunks, 32, 128, 128))
    return lambda: chunk_gradients.chunk_gradients(rows, states, scale=0.1, launch=launch)


def _wy_work(launch: LaunchIndex) -> Callable[[], object]:
    num_rows = int(launch.cu_seqlens[-1])
    rows = wy_gradients.WYRows(
        k=_halves(num_rows, 16, 128) / 12,
        v=_halves(num_rows, 32, 128),
        beta=_halves(num_rows, 32).sigmoid(),
        g=-torch.rand(1, num_rows, 32, device="cuda"),
        inverse=_halves(num_rows, 32, CHUNK_SIZE) / 10,
    )
    dw, du, dk = _halves(num_rows, 32, 128), _halves(num_rows, 32, 128), _halves(num_rows, 16, 128)
    return lambda: wy_gradients.wy_gradients(rows, dw, du, dk, launch=launch)


def _shapes(name: str, direction: str, launches: dict[str, LaunchIndex]) -> Iterator[Row]:
    delta = name in ("gdn", "kda", "kda-bounded")
    module = delta_rule if delta else decay_states
    torch.manual_seed(0)
    work = {shape: _work(name, direction, launch) for shape, launch in launches.items()}
    first: list[Tensor] | None = None
    for blocks, stages in product(BLOCKS if delta else SQUARES, STAGES):
        *block_k, block_v, warps = blocks
        shape = LaunchShape(
            block_k=block_k[0] if block_k else None, block_v=block_v, num_warps=warps, num_stages=stages
        )
        with patch.object(module, direction, {256: delta_rule.LaunchShapes(few=shape, many=shape)} if delta else shape):
            try:
                results = [x for run in work.values() for x in run()]
            except OutOfResources:
                continue
            first = first or results
            same = all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
            found = medians(work, repeats=9)
        yield {
            "tile": "x".join(map(str, blocks[:-1])),
            "warps": warps,
            "stages": stages,
            **_times(found),
            "same bits": same,
        }


def _work(name: str, direction: str, launch: LaunchIndex) -> Callable[[], tuple[Tensor, ...]]:
    """One direction of the states' kernel, on numbers of the right sizes."""
    num_rows = int(launch.cu_seqlens[-1])
    rows = {n: x[None].contiguous() for n, x in KINDS[name].streams(num_rows).items()}
    if name in ("gdn", "kda", "kda-bounded"):
        return _delta_work(rows, direction, launch)
    constant = "g" in KINDS[name].constant
    decay = decay_states.ChunkDecay(g=None if constant else rows["g"], gamma=rows["g"][0] if constant else None)
    if direction == "FORWARD":
        return lambda: (
            decay_states.tree_states(rows["k"], rows["v"], decay, launch=launch, dtype=torch.bfloat16),
        )  # fmt: skip
    return lambda: (
        decay_states.tree_state_gradients(
            rows["q"], rows["v"], decay, scale=1.0, launch=launch, dtype=torch.bfloat16
        ),
    )  # fmt: skip


def _delta_work(rows: Streams, direction: str, launch: LaunchIndex) -> Callable[[], tuple[Tensor, ...]]:
    k = torch.nn.functional.normalize(rows["k"], dim=-1) * 0.3
    w = k.repeat_interleave(rows["v"].shape[2] // k.shape[2], 2)
    channels = rows["g"].dim() == 4
    inputs = delta_rule.DeltaRuleRows(k=k, w=w, g=None if channels else rows["g"], gk=rows["g"] if channels else None)
    if direction == "FORWARD":
        return lambda: delta_rule.tree_states(inputs, rows["v"], launch=launch)
    return lambda: delta_rule.tree_state_gradients(inputs, rows["q"], rows["v"], rows["v"], scale=0.1, launch=launch)
