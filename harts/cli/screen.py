"""What a run shows: a progress bar and a table on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from harts.config import TrainConfig
from harts.train.loop import CHECKPOINT_FOLDER
from harts.train.metrics import METRICS_FILE, REWARDS_FILE, TENSORBOARD_FOLDER, StepMetrics, Summary

TABLE_ROWS = 15
PLAIN_LINES = 40
MIN_TERMINAL_WIDTH = 100


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


# Heading and text of every column of the table.
COLUMNS: tuple[tuple[str, Callable[[StepMetrics], str]], ...] = (
    ("step", lambda m: f"{'warm ' if m.phase == 'warm_start' else ''}{m.step}"),
    ("reward", lambda m: _optional(m.reward, ".3f")),
    ("loss", lambda m: f"{m.loss:.3f}"),
    ("KL", lambda m: _optional(m.kl, ".4f")),
    ("entropy", lambda m: _optional(m.entropy, ".2f")),
    ("tokens flat", lambda m: f"{m.tokens_flat}"),
    ("distinct", lambda m: f"{m.tokens_distinct}"),
    ("ratio", lambda m: f"{m.ratio:.1f}"),
    ("rounds", lambda m: f"{m.rounds}"),
    ("replayed", lambda m: f"{m.replayed_tokens}"),
    ("s tree", lambda m: f"{m.seconds_tree:.2f}"),
    ("s flat", lambda m: _optional(m.seconds_flat, ".2f")),
    ("log-prob diff", lambda m: _optional(m.max_logprob_diff, ".1e")),
    ("grad diff", lambda m: _optional(m.max_grad_rel_diff, ".1e")),
)


class LiveScreen:
    """A progress bar above the last steps, redrawn in place."""

    def __init__(self) -> None:
        """Draw on stdout."""
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._rows: deque[StepMetrics] = deque(maxlen=TABLE_ROWS)
        self._checked: StepMetrics | None = None
        self._live = Live(self._progress, refresh_per_second=4)

    @staticmethod
    def fits() -> bool:
        """Whether stdout is a terminal that is wide enough."""
        return sys.stdout.isatty() and Console().width >= MIN_TERMINAL_WIDTH

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def begin(self, config: TrainConfig, *, done: Sequence[StepMetrics], num_parameters: int) -> None:
        """See `Reporter`."""
        self._live.console.print(_headline(config, done, num_parameters))
        total = config.warm_start.steps + config.run.steps
        self._task = self._progress.add_task(config.rollout.environment, total=total, completed=len(done))

    def report(self, metrics: StepMetrics) -> None:
        """See `Reporter`."""
        self._rows.append(metrics)
        if metrics.seconds_flat is not None:
            self._checked = metrics
        table = Table(box=None, header_style="bold", padding=(0, 1))
        for heading, _ in COLUMNS:
            table.add_column(heading, justify="right")
        # The last checked step stays in sight until the next one.
        gone = [self._checked] if self._checked is not None and self._checked not in self._rows else []
        for row in [*gone, *self._rows]:
            style = "green" if row.seconds_flat is not None else None
            table.add_row(*(text(row) for _, text in COLUMNS), style=style)
        self._progress.advance(self._task)
        self._live.update(Group(self._progress, table))


class PlainScreen:
    """A line every few steps, and for every checked step: for files and pipes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def begin(self, config: TrainConfig, *, done: Sequence[StepMetrics], num_parameters: int) -> None:
        """See `Reporter`."""
        self._warm_steps, self._steps = config.warm_start.steps, config.run.steps
        self._print(_headline(config, done, num_parameters))
        self._print("  ".join(heading.rjust(self._width(heading)) for heading, _ in COLUMNS))

    def report(self, metrics: StepMetrics) -> None:
        """See `Reporter`."""
        total = self._warm_steps if metrics.phase == "warm_start" else self._steps
        every = max(1, (self._warm_steps + self._steps) // PLAIN_LINES)
        if metrics.step in (1, total) or metrics.step % every == 0 or metrics.seconds_flat is not None:
            self._print("  ".join(text(metrics).rjust(self._width(heading)) for heading, text in COLUMNS).rstrip())

    @staticmethod
    def _width(heading: str) -> int:
        return max(len(heading), 8 if heading == "step" else 6)

    @staticmethod
    def _print(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _headline(config: TrainConfig, done: Sequence[StepMetrics], num_parameters: int) -> str:
    rollout = config.rollout
    start = f"continuing after {len(done)} steps" if done else f"seed {config.seed}"
    return (
        f"{rollout.environment}: {num_parameters:,} parameters, {config.warm_start.steps} warm-start steps, "
        f"{config.run.steps} RL steps of {rollout.num_groups} x {rollout.siblings} episodes, {start}"
    )


def print_summary(summary: Summary, folder: Path) -> None:
    """Print what a run achieved and where its files lie."""
    lines = [
        "",
        f"Reward      {summary.reward_first:.3f} -> {summary.reward_last:.3f} (mean of the first and last tenth of RL)",
        f"Ratio       {summary.ratio:.1f} flat tokens for each distinct one",
    ]
    if summary.speedup is not None:
        gradient = "none to compare: siblings got equal rewards"
        if summary.max_grad_rel_diff is not None:
            gradient = f"{summary.max_grad_rel_diff:.1e} of the norm of a parameter's gradient"
        lines += [
            f"Speed-up    {summary.speedup:.1f} x, tree step over flat step",
            f"Difference  log-prob {summary.max_logprob_diff:.1e}, gradient {gradient} (largest seen)",
        ]
    lines += [
        f"Seconds     {summary.seconds:.0f}",
        f"Metrics     {folder / METRICS_FILE}",
        f"TensorBoard {folder / TENSORBOARD_FOLDER}",
        f"Picture     {folder / REWARDS_FILE}",
        f"Checkpoint  {max((folder / CHECKPOINT_FOLDER).glob('step-*'))}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
