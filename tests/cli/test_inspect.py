"""`harts inspect` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from harts.cli.main import app
from harts.data import Trajectory
from harts.data.readers import write_trajectories
from harts.data.trajectory import example_trajectories
from harts.inspect.text import printable

KEYS = [
    *("groups", "trajectories", "tokens_flat", "tokens_distinct", "ratio", "branch_points", "max_depth"),
    *("rounds_f", "rounds_e", "replayed_tokens", "predicted_speedup", "skipped"),
]
SHAPE = {"task": "[red]t[/red]\u001b[31m", "length": [300, 500, 400], "lcp": [0, 300, 200]}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)], env={"COLUMNS": "110"})


def numbers(*arguments: object) -> dict[str, object]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    write_trajectories(tmp_path / "example.jsonl", example_trajectories())
    return tmp_path / "example.jsonl"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    (tmp_path / "shapes.jsonl").write_text((json.dumps(SHAPE) + "\n") * 30)
    return tmp_path / "shapes.jsonl"


def test_json_of_the_worked_example(example: Path):
    found = numbers(example)
    assert [found[key] for key in KEYS] == [1, 4, 16, 8, 2.0, 2, 2, 1, 1, 5, None, 0]
    assert found["sharing_ends"] == {"forks": 2, "examined": 2, "kinds": {"sampled": {"forks": 2, "tokens": 0}}}
    assert [group["ratio"] for group in found["per_group"]] == [2.0]


def test_several_files_of_different_formats_add_up(example: Path, shapes: Path):
    found = numbers(example, shapes, "--model", "tiny:qwen3_5_text")
    assert (found["groups"], found["tokens_flat"], found["tokens_distinct"]) == (31, 16 + 30 * 1200, 8 + 30 * 700)
    assert found["predicted_speedup"] > 1.2


def test_the_screen_shows_numbers_groups_and_a_tree(shapes: Path):
    result = call(shapes, "--model", "tiny:qwen3_5_text")
    assert result.exit_code == 0
    for text in (
        "30 groups, 90 trajectories: 36,000 tokens, 21,000 distinct, ratio 1.71",
        "and 10 more",
        "x against flat",
    ):
        assert text in result.stdout
    assert "├─ (100 tokens) x2, ends 0" in result.stdout


def test_text_of_files_is_never_markup(shapes: Path, tmp_path: Path):
    result = call(shapes)
    assert "[red]t[/red]\\x1b[31m" in result.stdout and "\x1b" not in result.stdout
    assert printable("a\u202eb\n\x9b\ud800", 20) == "a\\u202eb\\n\\x9b\\ud800"
    page = tmp_path / "page.html"
    assert call(shapes, "--html", page).exit_code == 0
    assert "\x1b" not in page.read_text()


def test_where_sharing_ends_is_shown_with_ids(tmp_path: Path):
    long = list(range(100, 400))
    ids = [[1, 2, 3, *long, 4, *range(500, 600)], [1, 2, 3, 9, 4, *range(500, 600)]]
    path = tmp_path / "ids.jsonl"
    write_trajectories(path, [Trajectory.of(i, loss_mask=[0] * len(i)) for i in ids])
    result = call(path)
    assert "shortened" in result.stdout and "at least 101" in result.stdout
    assert "… 1 2 3" in result.stdout and "| 9 4 500 501" in result.stdout


def test_the_page_holds_trees_and_slots(shapes: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    result = call(shapes, "--model", "tiny:qwen3_5_text", "--html", page)
    assert result.exit_code == 0, result.output
    assert "A step of the first 30 groups on 8 ranks" in page.read_text()


def test_damaged_lines_are_counted_or_an_error(shapes: Path):
    with shapes.open("a") as file:
        file.write('{"length": [3], "lcp": [1]}\n')
    result = call(shapes)
    assert result.exit_code == 2 and "line 31" in result.stderr
    assert numbers(shapes, "--skip-bad")["skipped"] == 1


@pytest.mark.parametrize("arguments", [["--samples", "half"], ["--format", "none"], ["--model", "tiny:none"]])
def test_bad_options_name_what_is_wrong(example: Path, arguments: list[str]):
    result = call(example, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and arguments[1] in result.stderr
