"""The loop: what a run leaves behind, and that killed runs go on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harts.config import load_config
from harts.train import checkpoint, loop
from harts.train.metrics import METRICS_FILE, REWARDS_FILE, StepMetrics


class Silent:
    """Hears everything, says nothing."""

    def __init__(self) -> None:
        self.heard: list[StepMetrics] = []
        self.done_before = 0

    def begin(self, config, *, done, num_parameters) -> None:
        self.done_before = len(done)

    def report(self, metrics) -> None:
        self.heard.append(metrics)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    from tests.train.conftest import TINY

    folder = tmp_path_factory.mktemp("uninterrupted")
    loop.train(load_config(None, TINY), folder, Silent())
    return folder


def rows(folder: Path) -> list[dict[str, object]]:
    """The metrics, but for the seconds."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("seconds")} for line in lines]


def assert_equal_runs(first: Path, second: Path) -> None:
    assert rows(first) == rows(second)
    paths = [checkpoint.latest_checkpoint(folder / loop.CHECKPOINT_FOLDER) for folder in (first, second)]
    assert paths[0] is not None
    assert paths[1] is not None
    assert paths[0].name == paths[1].name
    weights = [load_file(path / "model.safetensors") for path in paths]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    (step, state), (other_step, other_state) = (checkpoint.load_trainer_state(path) for path in paths)
    assert step == other_step
    torch.testing.assert_close(state, other_state, rtol=0, atol=0)


def test_a_run_leaves_everything(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {"config.yaml", "tokenizer.json", "tensorboard", METRICS_FILE, REWARDS_FILE, "checkpoints"} <= names
    steps = rows(uninterrupted)
    assert [(row["phase"], row["step"]) for row in steps] == [
        *(("warm_start", n) for n in (1, 2, 3)),
        *(("rl", n) for n in (1, 2, 3, 4, 5)),
    ]
    checked = [row["step"] for row in steps if "max_logprob_diff" in row]
    assert checked == [2, 4]
    assert all("kl" in row and "entropy" in row for row in steps if row["phase"] == "rl")


def test_the_tree_step_is_the_flat_step(uninterrupted):
    for row in rows(uninterrupted):
        if "max_logprob_diff" in row:
            assert row["max_logprob_diff"] < 1e-5
            assert row.get("max_grad_rel_diff", 0.0) < 1e-3
        assert row["tokens_flat"] > row["tokens_distinct"]


def test_a_finished_run_resumed_changes_nothing(uninterrupted):
    before = rows(uninterrupted)
    reporter = Silent()
    summary = loop.resume(uninterrupted, reporter)
    assert reporter.heard == []
    assert reporter.done_before == 8
    assert rows(uninterrupted) == before
    assert summary.reward_last == before[-1]["reward"]


def test_a_folder_with_a_run_is_not_overwritten(uninterrupted, tiny_config):
    with pytest.raises(ValueError, match=r"holds a run.*--resume"):
        loop.train(tiny_config, uninterrupted, Silent())


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ValueError, match=r"holds no run.*config\.yaml"):
        loop.resume(tmp_path, Silent())


def test_another_seed_is_another_run(uninterrupted, tiny_config, tmp_path):
    loop.train(dataclasses.replace(tiny_config, seed=1), tmp_path, Silent())
    assert rows(tmp_path)[0]["loss"] != rows(uninterrupted)[0]["loss"]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "ppo"])
def test_every_objective_can_be_named(name):
    config = load_config(None, [f"objective.name={name}", "objective.kl_coef=0.1"])
    objective = loop.make_objective(config.objective)
    assert objective.needs_ref_logprobs
    assert objective.needs_entropy


def test_settings_of_the_objective_arrive():
    config = load_config(None, ["objective.clip_high=0.5", "objective.normalization=group"])
    objective = loop.make_objective(config.objective)
    assert objective.normalization == "group"
    assert "0.5" in repr(objective)


def test_forks_make_more_episodes(tiny_config, tmp_path):
    rollout = dataclasses.replace(tiny_config.rollout, siblings=4, branch_at=1)
    loop.train(dataclasses.replace(tiny_config, rollout=rollout), tmp_path, Silent())
    assert len(rows(tmp_path)) == 8


# A forked child has torch imported already. It runs until it is killed, by itself at a named moment or by the test.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.train.test_loop"])


def _kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _KilledAt(Silent):
    def __init__(self, phase: str | None, step: int) -> None:
        super().__init__()
        self.at = (phase, step)

    def report(self, metrics) -> None:
        if (metrics.phase, metrics.step) == self.at:
            _kill_self()


def _child(folder: Path, moment: str) -> None:
    reporter = Silent()
    match moment.split(" "):
        case ["after", phase, step]:
            reporter = _KilledAt(phase, int(step))
        case ["checkpoint", "half", "written"]:
            torch.save = _kill_self
        case ["old", "checkpoints", "left"]:
            checkpoint._remove = _kill_self
    from tests.train.conftest import TINY

    if (folder / loop.CONFIG_FILE).exists():
        loop.resume(folder, reporter)
    else:
        loop.train(load_config(None, TINY), folder, reporter)


def run_child(folder: Path, moment: str, *, kill_after_seconds: float | None = None) -> int | None:
    process = PROCESSES.Process(target=_child, args=(folder, moment))
    process.start()
    if kill_after_seconds is not None:
        time.sleep(kill_after_seconds)
        process.kill()
    process.join(timeout=120)
    return process.exitcode


@pytest.mark.slow
def test_a_run_killed_again_and_again_equals_one_that_was_not(uninterrupted, tmp_path):
    moments = [
        "checkpoint half written",  # the first one: there is nothing to go back to
        "after warm_start 1",  # before any checkpoint
        "after warm_start 3",
        "after rl 1",  # the reference policy comes from a checkpoint from here on
        "checkpoint half written",
        "old checkpoints left",
        "after rl 4",
    ]
    for moment in moments:
        assert run_child(tmp_path, moment) == -signal.SIGKILL, moment
    assert run_child(tmp_path, "never") == 0
    assert_equal_runs(uninterrupted, tmp_path)


def test_a_run_killed_at_random_moments_equals_one_that_was_not(uninterrupted, tmp_path):
    rng = random.Random(0)
    for _ in range(4):
        run_child(tmp_path, "never", kill_after_seconds=rng.uniform(0.1, 1.5))
    assert run_child(tmp_path, "never") == 0
    assert_equal_runs(uninterrupted, tmp_path)
