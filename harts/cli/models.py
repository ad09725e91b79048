"""`harts models`: which model types run on trees, and why others do not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from harts.models.registry import ModelRow

EPILOG = """
\b
Examples:
  harts models                                   the table
  harts models --json | jq '.[] | select(.supported) | .model_type'

Anything that is not in the table is refused too, and so is a supported model with a layer or setting that HARTS does
not know. harts.prepare(model, flat_only=True) trains such models with execution="flat". To add a model, state in one
file of harts/models/families how its layers run on trees.
"""

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of the table.")]


def models(as_json: Json = False) -> None:
    """List model types that run on trees, and those that are refused with the reason.

    The names are those of `model_type` in a configuration. Each kind of layer of a supported model runs on trees
    exactly: log-probs and gradients are those of training every trajectory alone.
    """
    from harts.models.registry import model_table

    rows = model_table()
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        _show(rows, Console())


def _show(rows: Sequence[ModelRow], console: Console) -> None:
    table = Table()
    for column in ("model type", "layers", "on trees", "reason"):
        table.add_column(column, overflow="fold")
    # Supported ones first, each part in the order of names.
    for row in sorted(rows, key=lambda row: not row.supported):
        table.add_row(
            row.model_type, ", ".join(row.layer_kinds), "supported" if row.supported else "refused", row.reason
        )
    console.print(table)
    console.print(f"{sum(row.supported for row in rows)} of {len(rows)} known model types run on trees")
