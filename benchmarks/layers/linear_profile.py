"""Which kernels a linear-attention layer spends its time in: fla's call of one sequence, and trees."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.layers import linear_trees as trees
from benchmarks.layers.linear_kinds import CHUNK_SIZE, KINDS
from benchmarks.layers.linear_timing import Row
from harts.layout.launch import launch_index, plan_launch

REPEATS = 5
ROUNDS = (1, 64, 128)
"""Of the caterpillars; the first has no branches."""


def profiled(name: str, num_tokens: int, run: Callable[..., Callable[[], object]]) -> dict[str, list[Row]]:
    """Milliseconds by kernel, the longest first, and their sum; a table an execution.

    Args:
        name: Key of KINDS.
        num_tokens: Distinct tokens.
        run: Given a kind, streams and an execution of them, its forward and backward pass.
    """
    kind = KINDS[name]
    tables = {f"{name} one sequence": kernel_times(run(kind, kind.streams(num_tokens), kind.public))}
    for rounds in ROUNDS:
        tree = trees.caterpillar(num_tokens, rounds, CHUNK_SIZE)
        plan = plan_launch(tree, CHUNK_SIZE)
        launch = launch_index(plan).to(torch.device("cuda"))
        work = run(kind, kind.streams(plan.token_R.size), lambda x, launch=launch: kind.tree(x, launch))
        title = f"{name} caterpillar of {rounds}, {plan.token_R.size} rows, {plan.slot_G.size} chunks"
        tables[title] = kernel_times(work)
        print(title, tables[title][-1], flush=True)
    return tables


def kernel_times(work: Callable[[], object]) -> list[Row]:
    """Means over `REPEATS` runs after two."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
    times = {e.key[:70]: e.device_time_total / 1000 / REPEATS for e in profiler.key_averages()}
    times = dict(sorted(((n, ms) for n, ms in times.items() if ms > 0), key=lambda item: -item[1]))
    return [{"kernel": n, "ms": round(ms, 3)} for n, ms in {**times, "all": sum(times.values())}.items()]
