"""Paths to records: what kind of file it is, by its first bytes, and folders of files."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Protocol

from harts.data.readers.columns import ARROW_MAGIC, PARQUET_MAGIC, STREAM_MAGIC, ArrowRows
from harts.data.readers.json_records import JsonRecords
from harts.data.readers.record import Record
from harts.data.readers.source import magic_of
from harts.data.readers.tensors import PICKLE_MAGIC, ZIP_MAGIC, TensorRows, looks_like_safetensors

# The first kind of file that a folder holds is read, whatever else lies there.
IN_FOLDERS = (
    ("*.arrow",),
    ("*.parquet",),
    ("*.traj",),
    ("*.traj.json",),
    ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst"),
    ("*.json", "*.json.gz", "*.json.zst"),
    ("*.safetensors",),
)


class Item(Protocol):
    """A record that is there but was not parsed."""

    @property
    def place(self) -> str: ...

    def load(self) -> Record: ...


class Records(Protocol):
    """The records of a file or folder, in order, and after one pass by number."""

    @property
    def path(self) -> Path: ...

    @property
    def position(self) -> int: ...

    def __iter__(self) -> Iterator[Item]: ...

    def at(self, numbers: Iterable[int]) -> Iterator[Item]: ...


def open_records(path: Path) -> Records:
    """The records at a path.

    Raises:
        ValueError: If there is nothing there, the file is a pickle, or it is damaged at its beginning.
    """
    if path.is_dir():
        return FolderRecords(path)
    magic = magic_of(path)
    if magic.startswith((PARQUET_MAGIC, ARROW_MAGIC, STREAM_MAGIC)):
        return ArrowRows(path, magic)
    if magic.startswith(ZIP_MAGIC) or looks_like_safetensors(magic):
        return TensorRows(path, magic)
    if magic.startswith(PICKLE_MAGIC):
        raise ValueError(
            f"{path} is a pickle, which may run any code when it is loaded. Save the tensors with safetensors, or "
            "with torch.save as a plain dictionary of tensors."
        )
    return JsonRecords(path)


def size_of(path: Path) -> int:
    """Bytes that `read` will report in all."""
    return sum(file.stat().st_size for file in _files(path)) if path.is_dir() else path.stat().st_size


def _files(folder: Path) -> list[Path]:
    for patterns in IN_FOLDERS:
        found = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
        # `datasets` leaves results of maps beside the data.
        found = {path for path in found if not path.name.startswith("cache-")}
        if found:
            return sorted(found)
    expected = ", ".join(pattern for patterns in IN_FOLDERS for pattern in patterns)
    raise ValueError(f"{folder} holds no rollout files, expected {expected}.")


class FolderRecords:
    """The records of all files of a folder, one file after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self._files = _files(path)
        self._starts = array("q")
        self._records: list[Records] = []

    def __iter__(self) -> Iterator[Item]:
        self._starts, self._records = array("q", [0]), []
        before = 0
        for number, file in enumerate(self._files):
            records = open_records(file)
            # It knows where its records are after this pass.
            self._records.append(records)
            count = 0
            for item in records:
                count += 1
                self.position = before + records.position
                yield item
            before += file.stat().st_size
            self._starts.append(self._starts[number] + count)
        self.position = before

    def at(self, numbers: Iterable[int]) -> Iterator[Item]:
        """Records by number."""
        for file, here in groupby(numbers, key=lambda number: bisect_right(self._starts, number) - 1):
            yield from self._records[file].at(number - self._starts[file] for number in here)
