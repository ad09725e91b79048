"""The command: its help teaches, its mistakes are one line, its last line is JSON."""

from __future__ import annotations

import json
import math
import re

import pytest
from typer.testing import CliRunner

from harts.cli.main import app
from tests.train.conftest import TINY


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments])


def test_help_teaches_with_examples():
    result = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "120"}, color=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    assert result.exit_code == 0
    for word in ("--resume", "--config", "--json", "run.steps=60", "branch_at", "TowerOfHanoi"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run.stepz=3"], "Unknown key 'run.stepz'. Did you mean run.steps"),
        (["run.steps=-3"], "run.steps is -3"),
        (["steps"], "expected key=value"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml' does not exist"),
        (["--resume", "nowhere"], "'nowhere' holds no run"),
        (["--resume", "nowhere", "seed=1"], "got key=value settings too"),
        (["--resume", "nowhere", "--output", "x"], "got --output too"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_run_ends_with_its_summary_and_one_line_of_json(tmp_path):
    folder = tmp_path / "run"
    result = invoke("--json", "--output", str(folder), *TINY)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    summary = json.loads(lines[-1])
    assert list(summary) == [
        "reward_first",
        "reward_last",
        "ratio",
        "speedup",
        "max_logprob_diff",
        "max_grad_rel_diff",
        "seconds",
    ]
    assert all(math.isfinite(value) for value in summary.values())
    text = result.stdout
    for name in ("metrics.jsonl", "tensorboard", "rewards.png", "checkpoints/step-000008"):
        assert str(folder / name) in text
        assert (folder / name).exists()
    header = next(line for line in lines if "reward" in line and "rounds" in line)
    for column in ("step", "loss", "KL", "entropy", "flat", "distinct", "ratio", "replayed", "s tree", "grad diff"):
        assert column in header
    assert "\x1b" not in text, "no drawing where stdout is not a terminal"

    again = invoke("--json", "--resume", str(folder))
    assert again.exit_code == 0
    resumed = json.loads(again.stdout.splitlines()[-1])
    assert {**resumed, "seconds": 0} == {**summary, "seconds": 0}

    taken = invoke("--output", str(folder), *TINY)
    assert taken.exit_code == 2
    assert "--resume" in taken.stderr
