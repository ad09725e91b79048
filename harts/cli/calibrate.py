"""`harts calibrate`: what each part of a microbatch costs on this device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

from harts.cli.model_names import HELP, load_model
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.flat import FlatLayout, flat_layout
from harts.layout.packed import PackedLayout, pack
from harts.logprobs import linear_logprobs
from harts.models import TreeModel, prepare
from harts.models.dimensions import model_dimensions
from harts.plan.calibration import Calibration, Fit, Sample, fit
from harts.plan.cost import ModelDimensions
from harts.plan.size import MicrobatchSize, size_of_flat, size_of_tree
from harts.tree import PrefixTree, build_prefix_tree

EPILOG = """
\b
Examples:
  harts calibrate --model tiny:qwen3_5_text --max-tokens 2048    on this CPU
  harts calibrate --model Qwen/Qwen3.5-4B --device cuda \\
      --output qwen3.5-4b-h200.json                              on a GPU
  harts plan rollouts.jsonl --model qwen3.5-4b-h200.json ...     fitted costs

Run it alone on the device: another job's time would be fitted too (with OMP_NUM_THREADS=1 on a CPU only the job's own
time counts).
"""
REPEATS = 5
HELD_OUT_EVERY = 4

ModelName = Annotated[str, typer.Option("--model", metavar="MODEL", help=HELP)]
Output = Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the calibration is stored.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=256, help="Tokens of the largest microbatch to time.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]


def calibrate(
    model: ModelName,
    output: Output = Path("calibration.json"),
    device: Device = "cpu",
    max_tokens: MaxTokens = 4096,
    as_json: Json = False,
) -> None:
    """Fit what each part of a microbatch costs on this device.

    Times a few microbatches, forward and backward, on trees and flat, of shapes that differ in tokens, depth, branches
    and trained tokens. Fits costs >= 0 to three quarters of them; the others show how well the costs predict.
    """
    try:
        calibration = measure(model, device=device, max_tokens=max_tokens)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    output.write_text(calibration.to_json(), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"output": str(output), **_errors(calibration)}))
    else:
        _show(calibration, output, Console())


def measure(name: str, *, device: str, max_tokens: int) -> Calibration:
    """Time microbatches of a model and fit its costs."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = prepare(load_model(name, dtype=dtype, device=device))
    dimensions = model_dimensions(model.module.config, bytes_per_element=dtype.itemsize)
    designs = list(_designs(max_tokens, model.vocab_size))
    passes = [_executions(batch, tree, model, dimensions, max_tokens) for batch, tree in designs]
    samples = {execution: _time(model, [both[execution] for both in passes]) for execution in ("tree", "flat")}
    tokens, saved = max(_saved_bytes(batch, tree, model) for batch, tree in designs)
    on_gpu = model.device.type == "cuda"
    return Calibration(
        model=name,
        device=torch.cuda.get_device_name(device) if on_gpu else f"{device}, {torch.get_num_threads()} threads",
        dtype=str(dtype).removeprefix("torch."),
        dimensions=dimensions,
        tree=_fit(samples["tree"]),
        flat=_fit(samples["flat"]),
        saved_bytes_per_token=saved / tokens,
    )


def _fit(samples: list[Sample]) -> Fit:
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return fit([s for i, s in enumerate(samples) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1], held_out=held_out)


def _designs(max_tokens: int, vocab_size: int) -> Iterator[tuple[TrajectoryBatch, PrefixTree]]:
    """Microbatches that differ in everything that has a cost of its own."""
    rng = np.random.default_rng(0)
    for tokens in (max_tokens // 8, max_tokens // 4, max_tokens // 2, max_tokens):
        # Single trajectory; bush at the root; bush at the end; comb with a branch every few tokens.
        for count, shared in ((1, 0.0), (8, 0.0), (2, 0.5), (6, 0.8), (12, 0.9), (8, -1.0), (24, -1.0)):
            trained = (0.02, 0.3, 1.0)[int(rng.integers(3))]
            words = _words(rng, tokens, count, shared, vocab_size)
            trajectories = [_trajectory(word, trained, rng) for word in words]
            batch = TrajectoryBatch.of(trajectories)
            yield batch, build_prefix_tree(batch)


def _words(rng: np.random.Generator, tokens: int, count: int, shared: float, vocab_size: int) -> list[np.ndarray]:
    if shared >= 0:
        trunk = rng.integers(0, vocab_size, int(tokens * shared))
        own = max(2, int((tokens - trunk.size) / count))
        return [np.concatenate([trunk, rng.integers(0, vocab_size, own)]) for _ in range(count)]
    half = tokens // 2
    trunk = rng.integers(0, vocab_size, half)
    own = max(2, half // count)
    places = np.linspace(half // (count + 1), half, count).astype(int)
    return [np.concatenate([trunk[:place], rng.integers(0, vocab_size, own)]) for place in places]


def _trajectory(word: np.ndarray, trained: float, rng: np.random.Generator) -> Trajectory:
    mask = rng.random(word.size) < trained
    mask[0], mask[-1] = False, True
    return Trajectory.of(word, loss_mask=mask)


def _executions(
    batch: TrajectoryBatch, tree: PrefixTree, model: TreeModel, dimensions: ModelDimensions, max_tokens: int
) -> dict[str, tuple[PackedLayout | FlatLayout, MicrobatchSize]]:
    packed = pack(tree, batch, model.needs).to(model.device)
    windows = dimensions.windows
    size = size_of_tree(
        tree, chunk_size=dimensions.chunk_size, windows=windows, loss_edges=packed.edges.target_E.numel()
    )
    # As many whole trajectories as the limit allows, so that flat microbatches are no larger than those on trees.
    members = np.arange(max(1, min(batch.num_trajectories, max_tokens // int(batch.length_N.max()))))
    flat = flat_layout(batch, members).to(model.device)
    computed_N = np.full(members.size, flat.token_ids_NL.shape[1])
    flat_size = size_of_flat(
        computed_N,
        has_linear_attention=dimensions.chunk_size is not None,
        windows=windows,
        loss_edges=flat.edges.target_E.numel(),
    )
    return {"tree": (packed, size), "flat": (flat, flat_size)}


def _time(model: TreeModel, passes: list[tuple[PackedLayout | FlatLayout, MicrobatchSize]]) -> list[Sample]:
    """The fastest of some passes of each microbatch, after one that is not timed.

    The repetitions go over all microbatches in turn, so that a slow moment of the device does not fall on one of them.
    """
    seconds = [[_seconds(model, layout) for layout, _ in passes] for _ in range(REPEATS + 1)]
    return [
        Sample(size=size, seconds=min(times))
        for (_, size), times in zip(passes, zip(*seconds[1:], strict=True), strict=True)
    ]


def _seconds(model: TreeModel, layout: PackedLayout | FlatLayout) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    # One thread's own time leaves out what other jobs on a shared machine take.
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    wait()
    begin = clock()
    logprob_E, _ = linear_logprobs(model.hidden_states(layout), model.head, layout.edges, logit_scale=model.logit_scale)
    logprob_E.sum().backward()
    wait()
    seconds = clock() - begin
    model.module.zero_grad()
    return seconds


def _saved_bytes(batch: TrajectoryBatch, tree: PrefixTree, model: TreeModel) -> tuple[int, int]:
    """Tokens of a microbatch, and the bytes that autograd keeps for it."""
    parameters = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TD = model.hidden_states(pack(tree, batch, model.needs).to(model.device))
    return hidden_TD.shape[0], sum(kept.values())


def _errors(calibration: Calibration) -> dict[str, float]:
    return {
        f"{name}_{kind}_error": round(float(value(errors)), 4)
        for name, errors in (("tree", calibration.tree.errors), ("flat", calibration.flat.errors))
        for kind, value in (("median", np.median), ("max", np.max))
    }


def _show(calibration: Calibration, output: Path, console: Console) -> None:
    costs = Table(title=f"{calibration.model} on {calibration.device}, {calibration.dtype}")
    for column in ("cost", "tree", "flat"):
        costs.add_column(column, justify="left" if column == "cost" else "right")
    for name in type(calibration.tree.parameters).__dataclass_fields__:
        values = [getattr(f.parameters, name) for f in (calibration.tree, calibration.flat)]
        if any(values):
            costs.add_row(name, *(f"{value * 1e6:.4g} us" for value in values))
    console.print(costs)
    held_out = Table(title="Held out: measured and predicted")
    for column in ("execution", "tokens", "runs", "rounds", "loss edges", "measured", "predicted", "error"):
        held_out.add_column(column, justify="left" if column == "execution" else "right")
    for name, fitted in (("tree", calibration.tree), ("flat", calibration.flat)):
        for sample, error in zip(fitted.held_out, fitted.errors, strict=True):
            counts = (sample.size.tokens, sample.size.runs, sample.size.rounds, sample.size.loss_edges)
            predicted = fitted.parameters.predict(sample.size)
            held_out.add_row(
                name, *map(str, counts), f"{sample.seconds * 1e3:.2f} ms", f"{predicted * 1e3:.2f} ms", f"{error:.1%}"
            )
    console.print(held_out)
    errors = _errors(calibration)
    estimate = calibration.dimensions.saved_elements_per_token * calibration.dimensions.bytes_per_element
    console.print(
        f"held-out error: trees {errors['tree_median_error']:.1%} median, {errors['tree_max_error']:.1%} most; "
        f"flat {errors['flat_median_error']:.1%} and {errors['flat_max_error']:.1%}"
    )
    console.print(
        f"kept for the backward pass: {calibration.saved_bytes_per_token:,.0f} bytes a token measured, "
        f"{estimate:,.0f} estimated for fused kernels"
    )
    console.print(f"stored in {output}")
