"""The `harts` command."""

from __future__ import annotations

import typer

from harts.cli import calibrate, check, inspect, models, plan
from harts.cli.train import EPILOG, train

app = typer.Typer(
    help="Agentic RL on rollout trees: shared tokens are computed once, gradients are those of each trajectory alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(epilog=EPILOG)(train)
app.command(epilog=check.EPILOG)(check.check)
app.command(epilog=inspect.EPILOG)(inspect.inspect)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=calibrate.EPILOG)(calibrate.calibrate)
app.command(epilog=models.EPILOG)(models.models)
