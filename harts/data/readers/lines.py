"""Text files, plain or gzip."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, Literal, cast


def open_text(path: Path, mode: Literal["rt", "wt"]) -> IO[str]:
    """Open a text file, through gzip if its name ends in .gz.

    Args:
        path: Of the file.
        mode: "rt" or "wt".
    """
    if path.suffix == ".gz":
        return cast(IO[str], gzip.open(path, mode, encoding="utf-8"))
    return path.open(mode, encoding="utf-8")
