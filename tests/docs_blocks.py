"""The code blocks of a page, and how commands in them are run or parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harts.cli.main import app
from harts.config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
UNLABELLED_OUTPUT = ("GuessTheNumber-v0-raw:", "harts/step.py  ")
"""How output begins where it is not marked as text: what `make train` prints, and the file map."""
PROGRAMS = ("harts", "make", "pip", "python")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    """Where it stands."""
    line: int
    """Of its fence, from 1."""
    language: str
    """What the fence says; may be empty."""
    text: str
    """What is inside."""

    @property
    def kind(self) -> str:
        """python, json, commands, session or output.

        Raises:
            ValueError: If it is none of these.
        """
        labelled = {"python": "python", "json": "json", "bash": "commands", "console": "session", "text": "output"}
        if self.language in labelled:
            return labelled[self.language]
        lines = [line for line in self.text.splitlines() if line.strip()]
        if not self.language and lines[0].startswith("$ "):
            return "session"
        if not self.language and all(line.split()[0] in PROGRAMS for line in lines):
            return "commands"
        if not self.language and self.text.startswith(UNLABELLED_OUTPUT):
            return "output"
        raise ValueError(f"{self.page}, line {self.line}: mark the block as python, json, bash, console or text.")

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of each command, without comments and what they are piped into."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.kind == "session":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        split = [shlex.split(line.partition("|")[0], comments=True) for line in lines]
        return [arguments for arguments in split if arguments]


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of a page, in order.

    Raises:
        ValueError: If a fence is indented or not closed, so that a block would be overlooked.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S))
    if len(re.findall(r"```|~~~", text)) != 2 * len(found):
        raise ValueError(f"{page}: a fence that is indented, not closed or of another kind.")
    for match in found:
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page=page, line=line, language=match[1], text=match[2])


def reason_not_to_run(arguments: list[str]) -> str | None:
    """Why a command is only parsed; None if it is run."""
    if arguments[0] != "harts":
        return "installs, or takes minutes"
    if arguments[1] in ("train", "calibrate"):
        return "takes minutes"
    if "cuda" in arguments:
        return "needs a GPU"
    if "--model" in arguments and "/" in arguments[arguments.index("--model") + 1]:
        return "needs a model of the Hub"
    return None


def run_command(arguments: list[str]) -> None:
    """Run a command of ours in this process; it must succeed."""
    result = CliRunner().invoke(app, arguments[1:], env={"COLUMNS": "120"})
    assert result.exit_code == 0, f"{shlex.join(arguments)}: {result.output} {result.exception}"


def parse_command(arguments: list[str]) -> None:
    """Fail unless the program, and everything that the command names of it, exist."""
    program, *rest = arguments
    if program == "harts":
        given: dict[str, Any] = {}
        command = subcommand(rest[0])
        command.callback = lambda **values: given.update(values)
        with pytest.raises(SystemExit) as end:
            command.main(rest[1:], prog_name=f"harts {rest[0]}")
        assert end.value.code == 0, shlex.join(arguments)
        if rest[0] == "train":
            load_config(None, given["overrides"] or [])
    elif program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert rest[0] in targets, f"make has no target {rest[0]}"
    elif program == "python":
        assert rest[0] == "-m", arguments
        spec = find_spec(rest[1])
        assert spec is not None and spec.origin is not None, f"there is no module {rest[1]}"
        source = Path(spec.origin).read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in rest[2:] if option.startswith("--")), arguments
    else:
        assert arguments[:2] == ["pip", "install"], arguments
        extras = {extra for part in rest for found in re.findall(r"\[(.*?)\]", part) for extra in found.split(",")}
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(f"\n{extra} = [" in project for extra in extras), arguments


def subcommand(name: str) -> Any:
    """A command of ours, built anew."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands, f"there is no harts {name}"
    return commands[name]


def options_of(name: str) -> set[str]:
    """The options of a command of ours."""
    return {option for parameter in subcommand(name).params for option in (*parameter.opts, *parameter.secondary_opts)}
