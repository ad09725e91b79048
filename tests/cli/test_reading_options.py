"""Commands that read rollouts take the same options, and say what they skipped."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harts.cli.main import app
from harts.cli.options import ReadingOptions, grouped_options
from tests.data.test_rendering import TOOLS, saved_tokenizer

runner = CliRunner()
OPTIONS = ("--samples", "--tokenizer", "--tools", "--format", "--skip-bad")
PLAN = ["--model", "tiny:qwen3", "--ranks", "1", "--max-tokens", "4096", "--json"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    said = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "I look at it."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "nothing"},
    ]
    lines = [json.dumps({"task_id": 1, "messages": said[:end]}) for end in (2, 4)]
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, "damaged"]) + "\n")
    return tmp_path / "log.jsonl"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    saved_tokenizer(tmp_path / "tokenizer", template=None)
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("command", ["plan", "check"])
def test_commands_share_them(command: str):
    result = runner.invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert all(option in result.stdout for option in OPTIONS)


def test_plan_of_messages(log: Path, tokenizer: Path, tmp_path: Path):
    named = ["--tokenizer", str(tokenizer)]
    result = runner.invoke(app, ["plan", str(log), *PLAN, *named])
    assert result.exit_code == 2 and "log.jsonl, line 3: no JSON" in result.output
    final = runner.invoke(app, ["plan", str(log), *PLAN, *named, "--skip-bad"])
    assert final.exit_code == 0, final.output
    assert "Skipped 1 damaged records of" in final.stderr and "line 3: no JSON" in final.stderr
    calls = runner.invoke(app, ["plan", str(log), *PLAN, *named, "--skip-bad", "--samples", "calls"])
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    tools = runner.invoke(app, ["plan", str(log), *PLAN, *named, "--skip-bad", "--tools", str(tmp_path / "tools.json")])
    steps = [json.loads(output.stdout) for output in (final, calls, tools)]
    # The first call is its own trajectory and the beginning of the second.
    assert steps[0]["tokens_distinct"] == steps[1]["tokens_distinct"] < steps[1]["tokens_flat"]
    assert steps[0]["tokens_flat"] < steps[1]["tokens_flat"]
    assert steps[2]["tokens_flat"] > steps[0]["tokens_flat"]


def test_check_of_messages(log: Path, tokenizer: Path):
    arguments = ["check", "--model", "tiny:qwen3", "--data", str(log), "--dtype", "float64", "--json", "--skip-bad"]
    result = runner.invoke(app, [*arguments, "--max-tokens", "512", "--tokenizer", str(tokenizer)])
    # Ids of this tokenizer go beyond the tiny model's vocabulary.
    assert result.exit_code == 2 and "Use the tokenizer that belongs to the model" in result.output


def test_check_refuses_shapes(tmp_path: Path):
    (tmp_path / "s.jsonl").write_text('{"length": [3], "lcp": [0]}\n')
    result = runner.invoke(app, ["check", "--model", "tiny:qwen3", "--data", str(tmp_path / "s.jsonl")])
    assert result.exit_code == 2 and "holds shapes, a check needs token ids" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "holds messages (messages), not token ids. Name a tokenizer"),
        (["--format", "csv"], "Got the format 'csv'"),
        (["--samples", "some"], "Got samples 'some'"),
        (["--tools", "nothing.json"], "nothing.json: no JSON"),
    ],
)
def test_errors_name_the_fix(log: Path, options: list[str], message: str):
    result = runner.invoke(app, ["plan", str(log), *PLAN, *options])
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_a_command_gets_its_options_as_one_object():
    got = []

    @grouped_options
    def show(path: Path, *, reading: ReadingOptions) -> None:
        got.append((path, reading))

    assert list(inspect.signature(show).parameters) == [
        *("path", "samples", "tokenizer", "chat_template", "tools", "format", "skip_bad")
    ]
    show(path=Path("p"), samples="calls", tokenizer=None, chat_template=None, tools=None, format=None, skip_bad=True)
    ((path, reading),) = got
    assert (path, reading.samples, reading.skip_bad) == (Path("p"), "calls", True)
