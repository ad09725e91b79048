"""`harts plan` and `harts calibrate` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from harts.cli import measure
from harts.cli.calibrate import calibrate
from harts.cli.plan import plan
from harts.data.readers import write_trajectories
from harts.data.trajectory import example_trajectories
from harts.plan.calibration import Calibration, Fit, Sample
from harts.plan.cost import CostParameters
from harts.plan.size import MicrobatchSize
from tests.plan.test_calibration import calibration

KEYS = [
    *("makespan", "lower_bound", "ratio_to_bound", "imbalance_p95", "slots"),
    *("tokens_flat", "tokens_distinct", "ratio", "ratio_kept", "seconds", "peers"),
]
GROUP = {"length": [30, 50, 40, 40], "lcp": [0, 30, 30, 20], "loss_spans": [[[10, 30]], [[30, 50]], [[30, 40]], []]}


def call(command: Callable[..., None], *arguments: object) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shapes(folder: Path, count: int) -> Path:
    path = folder / "shapes.jsonl"
    path.write_text((json.dumps(GROUP) + "\n") * count)
    return path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    write_trajectories(tmp_path / "example.jsonl", example_trajectories())
    return tmp_path / "example.jsonl"


def planned(*arguments: object) -> list[dict[str, object]]:
    result = call(plan, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_of_the_worked_example(example: Path):
    (step,) = planned(example, "--model", "tiny:qwen3_5_text", "--ranks", 2, "--max-tokens", 8)
    assert list(step) == KEYS
    assert (step["tokens_flat"], step["tokens_distinct"], step["ratio"], step["slots"]) == (16, 8, 2.0, 1)
    assert 0 < step["lower_bound"] <= step["makespan"]
    assert step["ratio_to_bound"] == pytest.approx(step["makespan"] / step["lower_bound"])
    # abcde and abc on one rank, abcz and abxy on the other: ab twice, c twice.
    assert step["ratio_kept"] == 16 / 11
    assert all(makespan >= step["makespan"] for makespan in step["peers"].values())


def test_groups_form_steps_in_the_order_of_the_file(tmp_path: Path):
    arguments = (shapes(tmp_path, 5), "--model", "tiny:qwen3", "--ranks", 1, "--max-tokens", 400)
    assert [step["tokens_flat"] for step in planned(*arguments)] == [5 * 160]
    assert [step["tokens_flat"] for step in planned(*arguments, "groups=2")] == [320, 320, 160]


def test_sharing_never_keeps_nothing(tmp_path: Path):
    arguments = (shapes(tmp_path, 3), "--model", "tiny:qwen3", "--ranks", 2, "--max-tokens", 400)
    (never,) = planned(*arguments, "sharing=never")
    (always,) = planned(*arguments, "sharing=always", "barrier=false", "replay=true")
    assert (never["ratio_kept"], always["ratio_kept"]) == (1.0, pytest.approx(160 / 80, rel=0.3))
    assert never["makespan"] > always["makespan"]


def test_the_screen_shows_slots_bounds_and_the_decision(tmp_path: Path):
    picture = tmp_path / "plan.html"
    result = call(
        plan, shapes(tmp_path, 4), "--model", "tiny:qwen3_5_text", "--ranks", 2, "--max-tokens", 100, "--html", picture
    )
    assert result.exit_code == 0, result.output
    for words in ("rank    1 ", "this plan", "lower bound", "sharing pays", "4 of 4 pay", "ratio kept", "GiB"):
        assert words in result.output
    html = picture.read_text()
    assert html.count("<rect") == 4
    assert "http" not in html.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "missing.jsonl"}, "missing.jsonl is no file"),
        ({"--model": "tiny:gpt2"}, "Model type 'gpt2' does not run on trees"),
        ({"--max-tokens": 20}, "50 tokens but max_tokens_per_microbatch is 20"),
        ({"setting": "group=3"}, "Got the setting 'group=3', expected one of groups="),
        ({"setting": "groups=0"}, "Got groups=0, expected an integer >= 1"),
        ({"setting": "sharing=maybe"}, "expected one of auto, always, never"),
        ({"setting": "barrier=no"}, "Got barrier=no, expected true or false"),
    ],
)
def test_errors_name_what_to_change(tmp_path: Path, changes: dict[str, object], message: str):
    values = {"path": shapes(tmp_path, 1), "setting": "seed=1", "--model": "tiny:qwen3", "--max-tokens": 400, **changes}
    path, setting = values.pop("path"), values.pop("setting")
    options = [part for item in values.items() for part in item]
    result = call(plan, path, setting, *options, "--ranks", 2)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("text", "message"), [("", "is empty"), ('{"tokens": 3}\n', "fields tokens, which is no format that is known")]
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    result = call(plan, path, "--model", "tiny:qwen3", "--ranks", 1, "--max-tokens", 9)
    assert (result.exit_code, message in result.output) == (2, True)


def test_a_config_file_is_a_model(tmp_path: Path, example: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}))
    (step,) = planned(example, "--model", config, "--ranks", 1, "--max-tokens", 8)
    assert step["makespan"] > 0


def test_a_calibration_is_stored_and_planned_with(tmp_path: Path, example: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    stored = tmp_path / "calibration.json"
    result = call(calibrate, "--model", "tiny:qwen3", "--max-tokens", 256, "--output", stored, "--json")
    assert result.exit_code == 0, result.output
    errors = json.loads(result.stdout.splitlines()[-1])
    found = Calibration.from_json(stored.read_text())
    assert errors["tree_median_error"] == pytest.approx(sorted(found.tree.errors)[3], abs=1e-4)
    asked = (example, "--model", stored, "--ranks", 1, "--max-tokens", 8, "sharing=always")
    (step,) = planned(*asked)
    assert 0 < step["makespan"] < 10
    assert "activations as measured" in " ".join(call(plan, *asked).output.split())


def test_microbatches_that_the_host_is_longer_at_are_told(tmp_path: Path, example: Path):
    costs = CostParameters(per_token=1e-4, per_microbatch=1e-4)
    sample = Sample(size=MicrobatchSize(tokens=1, pairs=1), seconds=1.0)
    stored = tmp_path / "calibration.json"
    said = []
    for least in (0.0, 6.5e-4):
        fitted = Fit(parameters=costs, held_out=(sample,), least=least)
        stored.write_text(calibration(fitted).to_json())
        result = call(plan, example, "--model", stored, "--ranks", 2, "--max-tokens", 8, "sharing=always")
        assert result.exit_code == 0, result.output
        said.append("microbatches are shorter than the 0.65 ms" in " ".join(result.output.split()))
    assert said == [False, True]
