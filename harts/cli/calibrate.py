"""`harts calibrate`: what each part of a microbatch costs on this device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from harts.cli.model_names import HELP
from harts.cli.options import counting_bar
from harts.plan.calibration import Calibration

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
MAX_TOKENS = 4096
MAX_TOKENS_GPU = 16_384

ModelName = Annotated[str, typer.Option("--model", metavar="MODEL", help=HELP)]
Output = Annotated[Path, typer.Option("--output", metavar="FILE", help="Where the calibration is stored.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        min=256,
        help="Tokens of the largest microbatch to time.",
        show_default=f"{MAX_TOKENS}, on a GPU {MAX_TOKENS_GPU}",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")]


def calibrate(
    model: ModelName,
    output: Output = Path("calibration.json"),
    device: Device = "cpu",
    max_tokens: MaxTokens = None,
    as_json: Json = False,
) -> None:
    """Fit what each part of a microbatch costs on this device.

    Times a few microbatches, forward and backward, on trees and flat, of shapes that differ in tokens, depth, branches
    and trained tokens. Fits costs >= 0 to three quarters of them; the others show how well the costs predict. On a GPU
    the kernels are compiled first, which takes minutes; passes of less than twice the time that the host takes to
    start one are left out.
    """
    from torch import OutOfMemoryError

    from harts.cli.measure import measure

    tokens = max_tokens or (MAX_TOKENS_GPU if device.startswith("cuda") else MAX_TOKENS)
    try:
        with counting_bar() as bar:
            task = bar.add_task("passes")
            calibration = measure(
                model,
                device=device,
                max_tokens=tokens,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except OutOfMemoryError as error:
        typer.echo(f"Error: no memory is left at microbatches of {tokens} tokens. Pass fewer (--max-tokens).", err=True)
        raise typer.Exit(2) from error
    output.write_text(calibration.to_json(), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"output": str(output), **_errors(calibration)}))
    else:
        _show(calibration, output, Console())


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
    held_out = Table(title="Held out: measured and predicted", show_edge=False, pad_edge=False)
    for column in ("execution", "tokens", "runs", "rounds", "loss edges", "measured", "predicted", "error"):
        held_out.add_column(column, justify="left" if column == "execution" else "right")
    for name, fitted in (("tree", calibration.tree), ("flat", calibration.flat)):
        for sample, error in zip(fitted.held_out, fitted.errors, strict=True):
            counts = (sample.size.tokens, sample.size.runs, sample.size.rounds, sample.size.loss_edges)
            predicted = fitted.predict(sample.size)
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
    if calibration.tree.least:
        console.print(
            f"the host takes {calibration.tree.least * 1e3:.1f} ms to start a pass on trees, "
            f"{calibration.flat.least * 1e3:.1f} ms flat: smaller microbatches take no less"
        )
    console.print(
        f"kept for the backward pass: {calibration.saved_bytes_per_token:,.0f} bytes a token measured, "
        f"{estimate:,.0f} estimated for fused kernels"
    )
    console.print(f"stored in {output}")
