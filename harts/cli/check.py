"""`harts check`: is a tree step on this model and these rollouts what training each trajectory alone would be?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from harts.cli.model_names import HELP
from harts.cli.options import ReadingOptions, counting_bar, grouped_options
from harts.data import Trajectory
from harts.data.readers import GroupShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from harts.check import BitsReport, CheckReport
    from harts.check.differences import Differences

EPILOG = """
\b
Examples:
  harts check --model tiny:qwen3_5 --data synthetic --dtype float64   a small random model, exactly
  harts check --model Qwen/Qwen3.5-4B --data rollouts.jsonl \\
      --device cuda --dtype bfloat16 --json                           your model, your rollouts

Every comparison stands beside what flat training differs from itself by, when it is run again, when trajectories are
padded into batches and when weights are moved by a rounding (not in 16 bits), and beside both errors against a
float64 copy of the model where that fits into memory.
On equal inputs, every layer that mixes tokens is run on what it reads in flat: its own difference is seen, and not
what came from the layers before.
With --exact, the forward pass alone is compared, bit by bit, both ways in exact mode.
The leak test changes tokens in some branches and looks at every layer's outputs outside of them.
Exit code: 0 if the verdict is "exact", "within-noise" or "bit-equal", 1 if it is "differs", 2 for an error.
"""
DtypeName = Literal["float64", "float32", "bfloat16"]

ModelName = Annotated[str, typer.Option("--model", metavar="MODEL", help=HELP)]
Data = Annotated[
    str,
    typer.Option("--data", metavar="PATH", help="Rollouts (token ids or message logs), or `synthetic`."),
]
Dtype = Annotated[DtypeName, typer.Option("--dtype", help="Of the model's weights and of the computation.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1, ...; the first GPU, if there is one")]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=16, help="Most tokens of all trajectories; the first that fit are taken.")
]
Truth = Annotated[
    bool | None,
    typer.Option("--truth/--no-truth", help="Compare with a float64 copy, too. Without either: where it fits."),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Only compare outputs, bit by bit, with kernels that fix every order. Slow.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Which rollouts are computed."""

    data: Data = "synthetic"
    """A path, or `synthetic`."""
    max_tokens: MaxTokens = 8192
    """Of all trajectories."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What is computed with."""

    dtype: Dtype = "float32"
    """Name of a torch dtype."""
    device: Device = None
    """None for the first GPU, if there is one."""
    exact: Exact = False
    """Whether only bits in exact mode are compared."""


@grouped_options
def check(
    *,
    model: ModelName,
    rollouts: Rollouts,
    reading: ReadingOptions,
    numerics: Numerics,
    truth: Truth = None,
    as_json: Json = False,
) -> None:
    """Compare tree and flat training on a model and rollouts.

    Runs one step both ways and compares log-probs, logits, the gradient of every parameter and the outputs of every
    layer that mixes tokens.
    """
    import torch

    from harts import check as checks
    from harts.cli.load_model import load_model

    try:
        found = numerics.device or ("cuda" if torch.cuda.is_available() else "cpu")
        module = load_model(model, dtype=getattr(torch, numerics.dtype), device=found)
        trajectories = _rollouts(module, rollouts, reading)
        report = _run_exact(module, trajectories) if numerics.exact else _run(module, trajectories, truth)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    elif isinstance(report, checks.CheckReport):
        _show(report, model, Console())
    else:
        _show_bits(report, model, Console())
    raise typer.Exit(0 if report.passed else 1)


def _run(model: PreTrainedModel, trajectories: list[Trajectory], truth: bool | None) -> CheckReport:
    from harts.check import check_model
    from harts.check.run import STEPS

    with _progress(STEPS) as progress:
        return check_model(model, trajectories, truth=truth, progress=progress)


def _run_exact(model: PreTrainedModel, trajectories: list[Trajectory]) -> BitsReport:
    from harts.check import check_bits
    from harts.check.bits import STEPS

    with _progress(STEPS) as progress:
        return check_bits(model, trajectories, progress=progress)


@contextmanager
def _progress(steps: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """A bar, and what moves it to a step."""
    with counting_bar() as bar:
        task = bar.add_task("", total=len(steps))
        yield lambda step: bar.update(task, description=step, completed=steps.index(step))


def _rollouts(model: PreTrainedModel, rollouts: Rollouts, reading: ReadingOptions) -> list[Trajectory]:
    from harts.check.synthetic import synthetic_rollouts
    from harts.models.registry import find_family

    if rollouts.data == "synthetic":
        family = find_family(model.config)
        unit = family.layout_needs(model.config).chunk_size or 64
        return synthetic_rollouts(model.config.vocab_size, unit=unit)
    taken = list(_first(reading, rollouts))
    if not taken:
        raise ValueError(
            f"{rollouts.data}: the first trajectory has more than {rollouts.max_tokens} tokens. Raise --max-tokens."
        )
    return taken


def _first(reading: ReadingOptions, rollouts: Rollouts) -> Iterator[Trajectory]:
    tokens = 0
    for group in reading.read(Path(rollouts.data)):
        if isinstance(group, GroupShape):
            raise ValueError(f"{rollouts.data} holds shapes, a check needs token ids. Give trajectories or messages.")
        for trajectory in group.trajectories:
            tokens += len(trajectory)
            if tokens > rollouts.max_tokens:
                return
            yield trajectory


def _show(report: CheckReport, model: str, console: Console) -> None:
    console.print(
        f"{model}, {report.dtype}: {report.tokens_flat:,} tokens, {report.tokens_distinct:,} distinct; "
        f"{report.rounds} rounds of linear attention ({report.rounds_e} if kernels returned inner states), "
        f"{report.replayed_tokens:,} tokens replayed"
    )
    table = Table(title="Whole model", box=SIMPLE)
    columns = ("", "max log-prob", "mean", "1 - cosine", "sym. KL", "gradient")
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    rows: dict[str, Differences | None] = {
        "tree - flat": report.tree,
        "flat, run again": report.rerun,
        "flat, padded": report.repack,
        "flat, rounded": report.rounded,
        "tree - float64": report.tree_truth,
        "flat - float64": report.flat_truth,
    }
    for name, pair in rows.items():
        if pair is not None:
            distance = 1 - pair.logit_cosine
            figures = (pair.max_logprob, pair.mean_logprob, distance, pair.symmetric_kl, pair.max_gradient)
            table.add_row(name, *(f"{figure:.1e}" for figure in figures))
    console.print(table)
    _show_layers(report, console)
    if report.tree.routing is not None:
        _show_routing(report, console)
    console.print(f"verdict: {report.verdict}{', a branch feels its siblings' if report.leak else ''}")


def _show_layers(report: CheckReport, console: Console) -> None:
    table = Table(title="By kind of layer: tree from flat, the largest", box=SIMPLE)
    table.add_column("", no_wrap=True)
    for column in ("outputs", "on equal inputs", "gradients", "leak"):
        table.add_column(column, justify="right")
    for kind in report.layer_kinds:
        found = [kind.output, kind.own, kind.gradient]
        noise = [kind.output_noise, kind.own_noise, kind.gradient_noise]
        shown, expected = ([f"{figure:.1e}" for figure in figures] for figures in (found, noise))
        shown.append(f"{'LEAKS ' if kind.leaks else ''}{kind.leak:.1e}")
        if kind.count == 0:  # only gradients are of layers that mix nothing
            shown[0] = shown[1] = shown[3] = expected[0] = expected[1] = ""
        table.add_row(f"{kind.name} x {kind.count}" if kind.count else kind.name, *shown)
        table.add_row("  flat from itself", *expected)
    console.print(table)


def _show_bits(report: BitsReport, model: str, console: Console) -> None:
    console.print(
        f"{model}, {report.dtype}, exact mode: {report.tokens_flat:,} tokens, {report.tokens_distinct:,} distinct; "
        f"{report.tokens_different:,} of {report.tokens_trained:,} log-probs differ, by {report.max_logprob_diff:.1e} "
        f"at most; smallest cosine of logits {report.logit_cosine:.6f}"
    )
    if report.first_layer_different is not None:
        console.print(f"first layer whose outputs differ: {report.first_layer_different}")
    console.print(f"verdict: {report.verdict}")


def _show_routing(report: CheckReport, console: Console) -> None:
    routing = report.tree.routing
    assert routing is not None
    table = Table(title="Tokens that a router sent elsewhere than flat did", box=SIMPLE)
    table.add_column("router", no_wrap=True)
    for column in ("tree", "flat, run again", "flat, padded"):
        table.add_column(column, justify="right")
    for router, flips in report.routing_flips.items():
        table.add_row(router, *(f"{count:,}" for count in flips.values()))
    console.print(table)
    console.print(
        f"routers: losses within {routing.aux_loss:.1e}, loads within {routing.load_count:g} tokens; max log-prob "
        f"difference {routing.max_logprob_unflipped:.1e} without a flip, {routing.max_logprob_flipped:.1e} with one"
    )
