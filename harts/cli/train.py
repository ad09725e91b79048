"""`harts train`: RL on rollout trees, from nothing to a trained checkpoint."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from harts.config import TrainConfig, load_config

EPILOG = """
\b
Examples:
  harts train                                    the default: a few minutes
  harts train seed=1 run.steps=60                other settings, as key=value
  harts train rollout.environment=TowerOfHanoi-v0-raw
  harts train rollout.branch_at=2                fork episodes at turn 2
  harts train objective.kl_coef=0.02             stay near the warm start
  harts train --config my.yaml --output runs/a   settings from a file
  harts train --resume runs/a                    go on after a kill, bit-equal
  harts train --json | tail -n 1                 the summary for programs

The settings and their defaults are in harts/config.py; every run writes its own to config.yaml.
"""

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, such as run.steps=60.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="YAML file of settings.")]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help="Folder of the run. Default: runs/ and the time.")
]
Resume = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Continue the run in this folder from its checkpoint.")
]
Json = Annotated[bool, typer.Option("--json", help="End with the summary as one line of JSON.")]


def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    output: Output = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Train a small hybrid-attention model on a multi-turn game.

    Builds a tokenizer, clones random legal play, then does GRPO: siblings of each game are compared, and the calls of
    all episodes are trained as one rollout tree. Now and then the same step is done trajectory by trajectory, and both
    are compared: log-probs, gradients, seconds.
    """
    try:
        settings = _settings(overrides or [], config, output, resume)
        folder = resume or output or _new_folder()
        _run(settings, folder, as_json=as_json)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def _settings(
    overrides: list[str], config: Path | None, output: Path | None, resume: Path | None
) -> TrainConfig | None:
    """The settings of a new run; None for one that goes on with its own."""
    if resume is None:
        return load_config(config, overrides)
    for given, name in ((overrides, "key=value settings"), (config, "--config"), (output, "--output")):
        if given:
            raise ValueError(f"--resume goes on with the run's own settings, but got {name} too. Leave that out.")
    return None


def _run(settings: TrainConfig | None, folder: Path, *, as_json: bool) -> None:
    # The rest of the library works without the rl extra.
    try:
        from harts.cli.screen import LiveScreen, PlainScreen, print_summary
        from harts.train import loop
    except ModuleNotFoundError as error:
        raise ValueError(f"harts train needs {error.name}. Install it with: pip install 'harts[rl]'") from error
    from transformers.utils import logging

    # Its bars and advice on GPU kernels would tear the table apart.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    screen = LiveScreen() if LiveScreen.fits() else PlainScreen()
    try:
        with screen:
            summary = loop.resume(folder, screen) if settings is None else loop.train(settings, folder, screen)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. Continue with: harts train --resume {folder}", err=True)
        raise typer.Exit(130) from None
    print_summary(summary, folder)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(summary)))


def _new_folder() -> Path:
    return Path("runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
