"""JSONL, plain or gzip, one object after the other, with errors that name the place."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, cast


def open_text(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open a text file, through gzip if its name ends in .gz.

    Args:
        path: Of the file.
        mode: "rt" or "wt".
    """
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, mode, encoding="utf-8"))
    return path.open(mode, encoding="utf-8")


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place (`name, line 3`) for messages. Empty lines are skipped.

    Raises:
        ValueError: If the file is missing, is no gzip though its name says so, or a line is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file. Give the path of a .jsonl or .jsonl.gz file.")
    with open_text(path, "rt") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}, line {number}", _parse(line, f"{path}, line {number}")
        except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, after line {number}: {error}. Expected whole UTF-8 text lines.") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: no JSON ({error}). Expected one object a line.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{place}: got a {type(value).__name__}, expected an object. Write one object a line.")
    return value
