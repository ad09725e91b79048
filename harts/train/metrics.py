"""The numbers of a run: one JSON line a step, the same as TensorBoard events, a picture of the rewards, a summary."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from torch.utils.tensorboard import SummaryWriter

Phase = Literal["warm_start", "rl"]
METRICS_FILE, TENSORBOARD_FOLDER, REWARDS_FILE = "metrics.jsonl", "tensorboard", "rewards.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One step. None where a step has no such number. All but the seconds are equal in equal runs."""

    phase: Phase
    """What the step belongs to."""
    step: int
    """Number of the step in its phase, from 1."""
    loss: float
    """The objective over the step."""
    reward: float | None = None
    """Mean reward of the episodes."""
    turns: float
    """Mean calls of the policy in an episode."""
    kl: float | None = None
    """k3 estimate of the divergence from the reference policy, nats a token; with a KL penalty only."""
    entropy: float | None = None
    """Mean entropy of the policy at trained tokens, nats; where the objective computes it."""
    tokens_flat: int
    """Tokens of all trajectories."""
    tokens_distinct: int
    """Tokens the tree step computed."""
    ratio: float
    """tokens_flat / tokens_distinct."""
    rounds: int
    """Largest number of sequential linear-attention calls of a microbatch."""
    replayed_tokens: int
    """Tokens whose linear-attention update was repeated."""
    grad_norm: float
    """Norm of the gradient before the clip."""
    learning_rate: float
    """Of this update."""
    seconds_rollout: float
    """Playing the episodes."""
    seconds_tree: float
    """The tree step."""
    seconds_flat: float | None = None
    """The flat step on the same weights and trajectories; on checked steps only."""
    max_logprob_diff: float | None = None
    """Largest absolute difference of a log-probability, tree against flat, nats."""
    max_grad_rel_diff: float | None = None
    """Largest over the parameters of ||g_tree - g_flat|| / ||g_flat||; also None if all siblings got equal rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a run achieved. Also the last line of `harts train --json`."""

    reward_first: float
    """Mean reward over the first tenth of the RL steps."""
    reward_last: float
    """Mean reward over the last tenth of the RL steps."""
    ratio: float
    """Flat over distinct tokens of all RL steps."""
    speedup: float | None
    """Seconds of the flat steps over those of the tree steps, over the checked steps; None without any."""
    max_logprob_diff: float | None
    """Largest over the checked steps."""
    max_grad_rel_diff: float | None
    """Largest over the checked steps."""
    seconds: float
    """Wall time of this command."""


class MetricsLog:
    """Writes the steps of a run to its folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Open the files.

        Args:
            folder: Of the run.
            keep: Steps to keep of what is there; later ones, written after the checkpoint that a run continues
                from, are cut off.
        """
        self._file = folder / METRICS_FILE
        self._file.touch()
        lines = self._file.read_bytes().splitlines(keepends=True)
        assert len(lines) >= keep, "metrics are written before the checkpoint that counts them"
        os.truncate(self._file, sum(map(len, lines[:keep])))
        self.steps = [StepMetrics(**json.loads(line)) for line in lines[:keep]]
        """The steps so far."""
        self._folder = folder
        self._events = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=keep + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Append a step."""
        self.steps.append(metrics)
        numbers = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(numbers) + "\n")
        for name, value in numbers.items():
            if name not in ("phase", "step"):
                self._events.add_scalar(f"{metrics.phase}/{name}", value, len(self.steps))

    def close(self, *, seconds: float) -> Summary:
        """Finish the files and sum up.

        Args:
            seconds: Wall time of the command, for the summary.
        """
        self._events.close()
        draw_rewards(self._folder / REWARDS_FILE, _rl_rewards(self.steps))
        return summarize(self.steps, seconds=seconds)


def summarize(steps: Sequence[StepMetrics], *, seconds: float) -> Summary:
    """Sum up the RL steps of a run.

    Args:
        steps: At least one of RL.
        seconds: Wall time of the command.
    """
    rl = [m for m in steps if m.phase == "rl"]
    rewards = _rl_rewards(steps)
    tenth = max(1, len(rewards) // 10)
    checked = [m for m in rl if m.seconds_flat is not None]
    return Summary(
        reward_first=float(np.mean(rewards[:tenth])),
        reward_last=float(np.mean(rewards[-tenth:])),
        ratio=sum(m.tokens_flat for m in rl) / sum(m.tokens_distinct for m in rl),
        speedup=sum(m.seconds_flat or 0.0 for m in checked) / sum(m.seconds_tree for m in checked) if checked else None,
        max_logprob_diff=max((m.max_logprob_diff or 0.0 for m in checked), default=None),
        max_grad_rel_diff=max((m.max_grad_rel_diff for m in checked if m.max_grad_rel_diff is not None), default=None),
        seconds=seconds,
    )


def _rl_rewards(steps: Sequence[StepMetrics]) -> list[float]:
    """Those of the warm start are of the games that it imitates, not of the policy."""
    return [m.reward for m in steps if m.phase == "rl" and m.reward is not None]


def draw_rewards(file: Path, rewards: Sequence[float]) -> None:
    """Draw the mean reward of every RL step, and its running mean, as a PNG."""
    # The object interface draws without a display and without matplotlib's global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    step = np.arange(1, len(rewards) + 1)
    axes.plot(step, rewards, color="tab:blue", alpha=0.35, label="step")
    window = max(1, len(rewards) // 10)
    mean = np.convolve(rewards, np.ones(window) / window, mode="valid")
    axes.plot(step[window - 1 :], mean, color="tab:blue", label=f"mean of {window} steps")
    axes.set(xlabel="RL step", ylabel="mean reward")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
