"""The RL loop: play, compare siblings, one exact step on the tree of their calls, update; again.

It knows nothing about the game. All draws are seeded by (seed, purpose, step), so a run that is killed and continued
equals one that was not.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from harts import objective as objectives
from harts.config import ObjectiveConfig, TrainConfig, dump_config, load_config
from harts.data import Trajectory
from harts.microbatches import Execution
from harts.models import TreeModel, prepare
from harts.objective.streams import Objective
from harts.rollout.collect import group_advantages, trajectories_of
from harts.rollout.environments import TextGame
from harts.rollout.episode import Episode
from harts.rollout.generate import SamplingSettings, play_with_model
from harts.rollout.random_play import episode_of, play_at_random
from harts.rollout.tokenizer import END, TurnTokenizer
from harts.step import StepResult, compute_logprobs, train_step
from harts.train.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_reference,
    load_trainer_state,
    save_checkpoint,
    write_atomically,
)
from harts.train.comparison import Comparison, compare_executions
from harts.train.metrics import MetricsLog, Phase, StepMetrics, Summary
from harts.train.optimizer import make_optimizer, update, warmed_up
from harts.train.policy import load_policy, random_policy

CONFIG_FILE, TOKENIZER_FILE, CHECKPOINT_FOLDER = "config.yaml", "tokenizer.json", "checkpoints"
TRANSCRIPTS_FOR_TOKENIZER = 100
MAX_VOCAB_SIZE = 1024
# What a draw is for. Part of every seed, so that no two purposes share draws.
_TRANSCRIPTS, _WEIGHTS, _DEMONSTRATIONS, _GAMES, _ACTIONS = range(5)


class Reporter(Protocol):
    """Who is told how a run goes."""

    def begin(self, config: TrainConfig, *, done: Sequence[StepMetrics], num_parameters: int) -> None:
        """A run starts, or continues after the steps in `done`."""
        ...

    def report(self, metrics: StepMetrics) -> None:
        """A step is done."""
        ...


def train(config: TrainConfig, folder: Path, reporter: Reporter) -> Summary:
    """Start a run.

    Args:
        config: Its settings.
        folder: Where everything goes; must not hold a run yet.
        reporter: Who is told.

    Returns:
        What the run achieved.

    Raises:
        ValueError: If the folder holds a run.
    """
    begin = time.perf_counter()
    file = folder / CONFIG_FILE
    if file.exists():
        raise ValueError(f"The folder '{folder}' holds a run. Continue it with --resume, or choose another --output.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, dump_config(config))
    return _Run(config, folder).finish(reporter, begin=begin)


def resume(folder: Path, reporter: Reporter) -> Summary:
    """Continue a run from its last checkpoint, or from the start if it has none yet.

    The weights, and all metrics but the seconds, become those of a run that was never interrupted.

    Args:
        folder: Of the run.
        reporter: Who is told.

    Returns:
        What the whole run achieved.

    Raises:
        ValueError: If the folder holds no run.
    """
    begin = time.perf_counter()
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"The folder '{folder}' holds no run: it has no {CONFIG_FILE}. Give the --output of a run.")
    return _Run(load_config(file), folder).finish(reporter, begin=begin)


def make_objective(config: ObjectiveConfig) -> Objective:
    """The policy gradient that the settings name; bounds and normaliser left out are the objective's own."""
    factories = {
        "grpo": objectives.grpo,
        "dapo": objectives.dapo,
        "gspo": objectives.gspo,
        "cispo": objectives.cispo,
        "ppo": objectives.ppo,
    }
    settings = {"clip_low": config.clip_low, "clip_high": config.clip_high, "normalization": config.normalization}
    return factories[config.name](
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        report_entropy=True,
        **{name: value for name, value in settings.items() if value is not None},  # pyright: ignore[reportArgumentType]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """What one optimizer step reports."""

    result: StepResult
    comparison: Comparison | None
    grad_norm: float
    learning_rate: float


class _Run:
    """A run between two steps: what is kept from step to step, and how one step is done."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        torch.set_num_threads(config.run.num_threads)
        self.objective = make_objective(config.objective)
        transcripts = self._random_transcripts()
        self.tokenizer = self._open_tokenizer(transcripts)
        self.longest_action = max(len(self.tokenizer.encode_action(action)) for action in transcripts[1::2])
        checkpoint = latest_checkpoint(folder / CHECKPOINT_FOLDER)
        module = load_policy(checkpoint) if checkpoint else self._random_policy()
        self.prepared: TreeModel = prepare(module)
        self.reference: TreeModel | None = None
        self.step = 0
        state: dict[str, object] | None = None
        if checkpoint:
            self.step, state = load_trainer_state(checkpoint)
            reference = self._random_policy()
            if load_reference(checkpoint, reference):
                self.reference = prepare(reference)
        self.optimizer = self._make_optimizer()
        if state is not None:
            self.optimizer.load_state_dict(state)
        self._timed_before = False

    def finish(self, reporter: Reporter, *, begin: float) -> Summary:
        """Do all steps that are left."""
        log = MetricsLog(self.folder, keep=self.step)
        num_parameters = sum(parameter.numel() for parameter in self.prepared.module.parameters())
        reporter.begin(self.config, done=log.steps, num_parameters=num_parameters)
        warm_steps = self.config.warm_start.steps
        last = warm_steps + self.config.run.steps
        while self.step < last:
            if self.step == warm_steps:
                self._start_rl()
            metrics = self._warm_step() if self.step < warm_steps else self._rl_step()
            self.step += 1
            log.write(metrics)
            if self.step % self.config.run.checkpoint_every == 0 or self.step in (warm_steps, last):
                self._save()
            reporter.report(metrics)
        return log.close(seconds=time.perf_counter() - begin)

    def _warm_step(self) -> StepMetrics:
        begin = time.perf_counter()
        rng = random.Random(self._seed(_DEMONSTRATIONS, self.step))
        episodes = []
        for group_id in range(self.config.warm_start.episodes):
            game = self._game(rng.getrandbits(31))
            transcript = play_at_random(game, rng)
            episodes.append(episode_of(transcript, self.tokenizer, group_id=group_id, reward=game.reward))
        trajectories = trajectories_of(episodes, np.zeros(len(episodes)), temperature=1.0)
        seconds = time.perf_counter() - begin
        done = self._update(trajectories, objectives.Supervised(), self.config.warm_start.learning_rate, step=self.step)
        return _metrics(done, episodes, phase="warm_start", step=self.step, seconds_rollout=seconds)

    def _rl_step(self) -> StepMetrics:
        begin = time.perf_counter()
        rollout, step = self.config.rollout, self.step - self.config.warm_start.steps
        episodes = self._play()
        advantage_N = group_advantages(
            np.array([episode.reward for episode in episodes]),
            np.array([episode.group_id for episode in episodes]),
            scale_by_std=self.config.objective.scale_by_std,
        )
        trajectories = trajectories_of(episodes, advantage_N, temperature=rollout.temperature)
        if self.reference is not None:
            trajectories = _with_reference(trajectories, self.reference, self.config.run.max_tokens_per_microbatch)
        seconds = time.perf_counter() - begin
        every = self.config.run.check_every
        check = every > 0 and (step + 1) % every == 0
        # Whichever of the two runs first finds the caches cold, so they take turns.
        first: Execution = "flat" if check and (step + 1) // every % 2 else "tree"
        done = self._update(
            trajectories, self.objective, self.config.optimizer.learning_rate, step=step, check=first if check else None
        )
        return _metrics(done, episodes, phase="rl", step=step, seconds_rollout=seconds)

    def _play(self) -> list[Episode]:
        rollout = self.config.rollout
        rng = random.Random(self._seed(_GAMES, self.step))
        seeds = [rng.getrandbits(31) for _ in range(rollout.num_groups)]
        started = rollout.siblings if rollout.branch_at is None else rollout.siblings // 2
        games = [(group_id, self._game(seed)) for group_id, seed in enumerate(seeds) for _ in range(started)]
        settings = SamplingSettings(
            temperature=rollout.temperature,
            max_action_tokens=rollout.max_action_tokens or self.longest_action,
            branch_at=rollout.branch_at,
        )
        generator = torch.Generator().manual_seed(self._seed(_ACTIONS, self.step))
        return play_with_model(self.prepared.module, self.tokenizer, games, settings=settings, generator=generator)

    def _update(
        self,
        trajectories: Sequence[Trajectory],
        objective: Objective,
        learning_rate: float,
        *,
        step: int,
        check: Execution | None = None,
    ) -> _Update:
        """One optimizer step; with `check`, the tree step is compared with the flat step, and `check` runs first."""
        limit, comparison = self.config.run.max_tokens_per_microbatch, None
        if check is None:
            result = train_step(self.prepared, trajectories, objective, max_tokens_per_microbatch=limit)
        else:
            self._warm_up_for_checks(trajectories, objective)
            comparison = compare_executions(
                self.prepared, trajectories, objective, max_tokens_per_microbatch=limit, first=check
            )
            result = comparison.tree
        rate = warmed_up(learning_rate, step=step, warmup_steps=self.config.optimizer.warmup_steps)
        norm = update(self.optimizer, learning_rate=rate, max_grad_norm=self.config.optimizer.max_grad_norm)
        return _Update(result=result, comparison=comparison, grad_norm=norm, learning_rate=rate)

    def _warm_up_for_checks(self, trajectories: Sequence[Trajectory], objective: Objective) -> None:
        """Run both executions once on a few trajectories, so that no first call is timed."""
        if not self._timed_before:
            few = trajectories[:4]
            compare_executions(
                self.prepared, few, objective, max_tokens_per_microbatch=self.config.run.max_tokens_per_microbatch
            )
            self.prepared.module.zero_grad(set_to_none=True)
            self._timed_before = True

    def _start_rl(self) -> None:
        """Freeze the reference policy and start the optimizer afresh."""
        self.optimizer = self._make_optimizer()
        if self.config.objective.kl_coef > 0:
            reference = self._random_policy()
            reference.load_state_dict(self.prepared.module.state_dict())
            self.reference = prepare(reference)

    def _save(self) -> None:
        checkpoint = Checkpoint(
            step=self.step,
            module=self.prepared.module,
            optimizer=self.optimizer,
            reference=None if self.reference is None else self.reference.module,
        )
        save_checkpoint(self.folder / CHECKPOINT_FOLDER, checkpoint, self.tokenizer.bpe, end_token=END)

    def _random_transcripts(self) -> list[str]:
        """Observations and actions in turn, of some games one after the other."""
        rng = random.Random(self._seed(_TRANSCRIPTS))
        texts: list[str] = []
        for _ in range(TRANSCRIPTS_FOR_TOKENIZER):
            texts += play_at_random(self._game(rng.getrandbits(31)), rng)
        return texts

    def _open_tokenizer(self, transcripts: Sequence[str]) -> TurnTokenizer:
        file = self.folder / TOKENIZER_FILE
        if file.is_file():
            return TurnTokenizer.load(file)
        tokenizer = TurnTokenizer.build(transcripts, MAX_VOCAB_SIZE)
        write_atomically(file, tokenizer.bpe.to_str(pretty=True))
        return tokenizer

    def _random_policy(self) -> PreTrainedModel:
        return random_policy(self.config.model, vocab_size=self.tokenizer.vocab_size, seed=self._seed(_WEIGHTS))

    def _make_optimizer(self) -> torch.optim.AdamW:
        return make_optimizer(
            self.prepared.module,
            learning_rate=self.config.optimizer.learning_rate,
            weight_decay=self.config.optimizer.weight_decay,
        )

    def _game(self, seed: int) -> TextGame:
        rollout = self.config.rollout
        return TextGame(
            rollout.environment, seed=seed, max_turns=rollout.max_turns, tolerated_errors=rollout.tolerated_errors
        )

    def _seed(self, purpose: int, step: int = 0) -> int:
        return int(np.random.SeedSequence([self.config.seed, purpose, step]).generate_state(1)[0])


def _with_reference(trajectories: Sequence[Trajectory], reference: TreeModel, limit: int) -> list[Trajectory]:
    """Add the reference policy's log-probs."""
    logprobs_P = compute_logprobs(reference, trajectories, max_tokens_per_microbatch=limit)
    ends = np.cumsum([trajectory.loss_mask.sum() for trajectory in trajectories])
    filled = []
    for trajectory, logprobs in zip(trajectories, np.split(logprobs_P, ends[:-1]), strict=True):
        stream = np.zeros(len(trajectory))
        stream[trajectory.loss_mask] = logprobs
        filled.append(dataclasses.replace(trajectory, ref_logprobs=stream))
    return filled


def _metrics(
    done: _Update, episodes: Sequence[Episode], *, phase: Phase, step: int, seconds_rollout: float
) -> StepMetrics:
    result, comparison = done.result, done.comparison
    return StepMetrics(
        phase=phase,
        step=step + 1,
        loss=result.loss,
        reward=float(np.mean([episode.reward for episode in episodes])),
        turns=float(np.mean([episode.num_turns for episode in episodes])),
        kl=result.metrics.get("kl"),
        entropy=result.metrics.get("entropy"),
        tokens_flat=result.num_tokens_flat,
        tokens_distinct=result.num_tokens_distinct,
        ratio=result.num_tokens_flat / result.num_tokens_distinct,
        rounds=result.num_rounds,
        replayed_tokens=result.num_replayed,
        grad_norm=done.grad_norm,
        learning_rate=done.learning_rate,
        seconds_rollout=seconds_rollout,
        seconds_tree=result.seconds,
        seconds_flat=comparison and comparison.flat.seconds,
        max_logprob_diff=comparison and comparison.max_logprob_diff,
        max_grad_rel_diff=comparison and comparison.max_grad_rel_diff,
    )
