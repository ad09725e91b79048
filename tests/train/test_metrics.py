"""The files of a run, and the summary by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from harts.train import metrics
from harts.train.metrics import METRICS_FILE, REWARDS_FILE, TENSORBOARD_FOLDER, MetricsLog, StepMetrics, summarize


def step(number: int, **fields) -> StepMetrics:
    values = {
        "phase": "rl",
        "step": number,
        "loss": 0.5,
        "reward": 0.25,
        "turns": 3.0,
        "tokens_flat": 40,
        "tokens_distinct": 10,
        "ratio": 4.0,
        "rounds": 2,
        "replayed_tokens": 5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "seconds_rollout": 0.1,
        "seconds_tree": 0.2,
    }
    return StepMetrics(**{**values, **fields})


def lines(folder) -> list[str]:
    return (folder / METRICS_FILE).read_text().splitlines()


def test_a_step_is_a_line_without_what_it_lacks(tmp_path):
    log = MetricsLog(tmp_path, keep=0)
    log.write(step(1))
    written = json.loads(lines(tmp_path)[0])
    assert written["tokens_flat"] == 40
    assert "kl" not in written


def test_continuing_cuts_off_what_came_after_the_checkpoint(tmp_path):
    log = MetricsLog(tmp_path, keep=0)
    for number in range(1, 6):
        log.write(step(number))
    # A writer killed in the middle of a line.
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"phase": "rl", "st')
    log = MetricsLog(tmp_path, keep=3)
    assert [m.step for m in log.steps] == [1, 2, 3]
    log.write(step(4, loss=9.0))
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert json.loads(lines(tmp_path)[3])["loss"] == 9.0


def test_closing_leaves_a_picture_and_events(tmp_path):
    log = MetricsLog(tmp_path, keep=0)
    for number in range(1, 4):
        log.write(step(number, reward=number / 4))
    log.close(seconds=1.0)
    assert (tmp_path / REWARDS_FILE).read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    events.Reload()
    assert [event.value for event in events.Scalars("rl/reward")] == [0.25, 0.5, 0.75]
    assert [event.step for event in events.Scalars("rl/reward")] == [1, 2, 3]


def test_the_picture_shows_the_policy_not_what_it_imitated(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(metrics, "draw_rewards", lambda file, rewards: drawn.extend(rewards))
    log = MetricsLog(tmp_path, keep=0)
    log.write(dataclasses.replace(step(1, reward=1.0), phase="warm_start"))
    log.write(step(1, reward=0.5))
    assert log.close(seconds=1.0).reward_first == 0.5
    assert drawn == [0.5]


def test_the_summary_by_hand():
    steps = [step(n, reward=n / 20) for n in range(1, 21)]
    steps[4] = dataclasses.replace(
        steps[4], tokens_flat=140, seconds_flat=2.0, max_logprob_diff=1e-6, max_grad_rel_diff=1e-5
    )
    steps[9] = dataclasses.replace(steps[9], seconds_flat=1.0, max_logprob_diff=3e-6, max_grad_rel_diff=2e-6)
    summary = summarize([step(1, phase="warm_start", reward=9.0), *steps], seconds=7.0)
    assert summary.reward_first == pytest.approx(0.075)
    assert summary.reward_last == pytest.approx(0.975)
    assert summary.ratio == pytest.approx(900 / 200)
    assert summary.speedup == pytest.approx(3.0 / 0.4)
    assert summary.max_logprob_diff == 3e-6
    assert summary.max_grad_rel_diff == 1e-5
    assert summary.seconds == 7.0


def test_a_run_without_checks_has_no_speed_up():
    summary = summarize([step(1)], seconds=1.0)
    assert (summary.speedup, summary.max_logprob_diff, summary.max_grad_rel_diff) == (None, None, None)
    assert summary.reward_first == summary.reward_last == 0.25
