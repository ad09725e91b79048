"""What README and docs/ say is so: code runs, commands exist, messages are in the source, figures are up to date.

Each block is of exactly one class: run (python, and commands that need nothing but files), parsed (json, and commands
that need a GPU, a download or minutes) or output. A block of no class fails.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from docs.figures import FIGURES, IMAGES, Example
from harts import Trajectory
from harts.cli.model_names import find_costs
from harts.data.readers import write_trajectories
from harts.data.trajectory import example_trajectories
from harts.models.tiny import tiny_model
from harts.plan.calibration import Calibration, Fit
from tests.docs_blocks import (
    PAGES,
    ROOT,
    Block,
    blocks_of,
    options_of,
    parse_command,
    reason_not_to_run,
    run_command,
    subcommand,
)


def page_text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def prelude() -> dict[str, object]:
    """All that python blocks may use without defining it."""
    hf_model = tiny_model("qwen3_5_text")
    trajectories = example_trajectories(advantages=0.5, sampling_logprobs=-4.0)

    def loss(logits: torch.Tensor, trajectory: Trajectory) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[0, :-1], torch.from_numpy(trajectory.token_ids[1:]))

    return {
        "hf_model": hf_model,
        "model": lambda ids: hf_model(torch.from_numpy(ids)),
        "optimizer": torch.optim.SGD(hf_model.parameters(), lr=0.01),
        "loss": loss,
        "trajectories": trajectories,
        "rollouts": [(t.token_ids, t.loss_mask, t.advantages, t.sampling_logprobs) for t in trajectories],
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that commands and python blocks name: small, but of the kind that the text says they are."""
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^## (\S+)$.*?^```json$\n(.*?)^```$", page_text("docs/formats.md"), re.M | re.S)
    for name, text in examples:
        Path(f"{name}.json").write_text(text)
    Path("tau-bench.json").rename("results.json")
    Path("tools.json").write_text('[{"type": "function", "function": {"name": "look", "parameters": {}}}]')
    write_trajectories(Path("rollouts.jsonl"), example_trajectories(advantages=0.5, sampling_logprobs=-4.0))
    with gzip.open("tau_airline_calls.jsonl.gz", "wt") as file:
        file.write(dict(examples)["shapes"] * 8)
    named = find_costs("tiny:qwen3_5_text")
    fits = [Fit(parameters=costs, held_out=()) for costs in (named.costs.tree, named.costs.flat)]
    calibration = Calibration(
        model="tiny:qwen3_5_text",
        device="cpu",
        dtype="float32",
        dimensions=named.dimensions,
        tree=fits[0],
        flat=fits[1],
        saved_bytes_per_token=1e4,
    )
    Path("qwen3.5-4b-h200.json").write_text(calibration.to_json())
    return tmp_path


def execute(block: Block, namespace: dict[str, object]) -> None:
    """Run or parse a block, whichever its class asks for."""
    if block.kind == "python":
        # Blank lines before it, so that a traceback has the line of the page.
        exec(compile("\n" * block.line + block.text, block.page, "exec"), namespace)
    elif block.kind == "json":
        try:
            json.loads(block.text)
        except ValueError:
            assert all(json.loads(line) for line in block.text.splitlines())
    elif block.kind in ("commands", "session"):
        assert block.commands, f"{block.page}, line {block.line}: no command in it"
        for arguments in block.commands:
            (run_command if reason_not_to_run(arguments) is None else parse_command)(arguments)
    else:
        assert block.kind == "output"


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("folder")
def test_code_blocks(page: str, capsys: pytest.CaptureFixture[str]):
    blocks = list(blocks_of(page))
    namespace = prelude() if any(block.kind == "python" for block in blocks) else {}
    before, printed = None, ""
    for block in blocks:
        execute(block, namespace)
        if block.kind == "output" and before == "python":
            assert block.text == printed, f"{page}, line {block.line}: not what the block before it prints"
        before, printed = block.kind, capsys.readouterr().out


PLANTED = {
    "a block of no class": ("", "something else\n"),
    "another language": ("yaml", "a: 1\n"),
    "code that fails": ("python", "assert 1 == 2\n"),
    "no JSON": ("json", "{a}\n"),
    "a command that is not there": ("bash", "harts fly\n"),
    "an option that is not there": ("bash", "harts check --model Qwen/Qwen3.5-4B --fast\n"),
    "a setting that is not there": ("bash", "harts train run.step=1\n"),
    "a session without a command": ("console", "harts models\n"),
    "a file that is not there": ("console", "$ harts inspect nothing.jsonl\noutput\n"),
    "a target that is not there": ("", "make love\n"),
    "an extra that is not there": ("bash", "pip install 'harts[everything]'\n"),
    "an option of a script that is not there": ("bash", "python -m benchmarks.planner --fast\n"),
}


@pytest.mark.parametrize("case", PLANTED)
@pytest.mark.usefixtures("folder")
def test_a_planted_mistake_is_found(case: str):
    language, text = PLANTED[case]
    with pytest.raises((AssertionError, ValueError)):
        execute(Block(page="planted", line=1, language=language, text=text), {})


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_these_options(page: str):
    for words in re.findall(r"`harts ((?:\w+)[^`]*)`", re.sub(r"^```.*?^```$", "", page_text(page), flags=re.M | re.S)):
        name, *rest = words.split()
        unknown = {word for word in rest if word.startswith("--")} - options_of(name)
        assert not unknown, f"{page}: harts {words}"


def test_examples_of_help_texts_parse():
    parsed = 0
    for name in ("train", "check", "inspect", "plan", "calibrate", "models"):
        for line in re.sub(r"\s*\\\n\s*", " ", subcommand(name).epilog).splitlines():
            command = re.split(r"\s{2,}", line.strip())[0].partition(" | ")[0]
            if command.startswith("harts ") and "..." not in command:
                parse_command(shlex.split(command))
                parsed += 1
    assert parsed > 15


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str):
    for target in re.findall(r"\]\(([^)#\s]+)", page_text(page)):
        assert "://" in target or ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_every_page_is_in_the_navigation():
    navigation = page_text("mkdocs.yml")
    assert all(f" {page.removeprefix('docs/')}\n" in navigation for page in PAGES if page != "README.md")


def test_the_file_map_names_what_exists():
    (file_map,) = (block for block in blocks_of("README.md") if block.text.startswith("harts/step.py"))
    paths = [line.split()[0] for line in file_map.text.splitlines() if not line.startswith(" ")]
    assert len(paths) > 15 and [path for path in paths if not (ROOT / path).exists()] == []


def test_benchmarks_name_the_commits_of_their_reports():
    rows = re.findall(r"\((\.\./benchmarks/reports/\S+\.md)\) \| (\w+) \|", page_text("docs/benchmarks.md"))
    assert len(rows) >= 2
    for report, commit in rows:
        assert f"- commit: {commit}\n" in (ROOT / "docs" / report).read_text(encoding="utf-8"), report


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_up_to_date(name: str):
    drawn = FIGURES[name](Example.build()).svg()
    assert (IMAGES / name).read_text(encoding="utf-8") == drawn, "draw it again: python -m docs.figures"


def source_texts() -> Iterator[str]:
    """Every text in the source of harts, with a mark where values are filled in."""
    for path in sorted((ROOT / "harts").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def quoted_messages() -> list[str]:
    quotes = re.findall(r"^> .*(?:\n> .*)*", page_text("docs/errors.md"), re.M)
    return [quote.replace("\n> ", " ").removeprefix("> ") for quote in quotes]


def is_in(message: str, texts: set[str]) -> bool:
    """Whether one of the texts has the pieces of a message between its dots, in order."""
    pieces = [piece.strip() for piece in message.split("...")]
    return any(has_in_order(text, pieces) for text in texts)


def has_in_order(text: str, pieces: list[str]) -> bool:
    place = 0
    for piece in pieces:
        place = text.find(piece, place) + len(piece)
        if place < len(piece):
            return False
    return True


def test_quoted_errors_are_in_the_source():
    texts = set(source_texts())
    messages = quoted_messages()
    assert len(messages) > 30
    assert [message for message in messages if not is_in(message, texts)] == []
    assert not is_in("Trajectory ... is too good to be true.", texts)
