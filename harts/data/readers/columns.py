"""Rows of parquet files and of arrow files and streams (what `datasets` saves to disk)."""

from __future__ import annotations

import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from harts.data.readers.record import Record

PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
# An arrow stream begins with a continuation marker and the length of its schema.
STREAM_MAGIC = b"\xff\xff\xff\xff"
ROWS = 256


class Column(Protocol):
    """The values of one column, by row."""

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowItem:
    """A row that was not turned into Python values yet."""

    place: str
    """For messages."""
    columns: dict[str, Column]
    """Of the batch of rows that it is in."""
    row: int
    """Of the batch."""
    file_name: str
    """As in `Record`."""

    def load(self) -> Record:
        """The values of the row; columns without a value are left out."""
        values = {name: column[self.row] for name, column in self.columns.items()}
        kept = {name: value for name, value in values.items() if value is not None}
        return Record(place=self.place, fields=kept, file_name=self.file_name)


class _Lists:
    """A column of lists of numbers or booleans, as slices of one array; of lists of such lists, as lists of slices."""

    def __init__(self, values: np.ndarray | _Lists, offsets: np.ndarray, is_valid: np.ndarray) -> None:
        self._values, self._offsets, self._is_valid = values, offsets, is_valid

    def __getitem__(self, row: int) -> Any:
        if not self._is_valid[row]:
            return None
        begin, end = int(self._offsets[row]), int(self._offsets[row + 1])
        if isinstance(self._values, _Lists):
            return [self._values[inner] for inner in range(begin, end)]
        return self._values[begin:end]


class ArrowRows:
    """The rows of a file, in order; after one pass also by number."""

    def __init__(self, path: Path, magic: bytes) -> None:
        self.path = path
        self.position = 0
        self._is_parquet = magic.startswith(PARQUET_MAGIC)
        self._is_stream = magic.startswith(STREAM_MAGIC)
        self._starts = array("q")
        self._mapped: Any = None
        self._last: tuple[int, dict[str, Column]] | None = None

    def __iter__(self) -> Iterator[RowItem]:
        with _errors(self.path) as arrow:
            self._starts = array("q")
            first = 0
            for batch in self._batches(arrow):
                self._starts.append(first)
                columns = _columns(arrow, batch)
                for row in range(batch.num_rows):
                    yield self._item(first + row, columns, row)
                first += batch.num_rows

    def at(self, numbers: Iterable[int]) -> Iterator[RowItem]:
        """Rows by their number. The file is written once, uncompressed and mapped, for that."""
        with _errors(self.path) as arrow:
            if self._mapped is None:
                self._mapped = self._map_copy(arrow)
            for number in numbers:
                batch = bisect_right(self._starts, number) - 1
                if self._last is None or self._last[0] != batch:
                    self._last = batch, _columns(arrow, self._mapped.get_batch(batch))
                yield self._item(number, self._last[1], number - self._starts[batch])

    def _map_copy(self, arrow: ModuleType) -> Any:
        """A copy in which every batch can be had without reading others."""
        with tempfile.NamedTemporaryFile() as copy:
            writer = None
            for batch in self._batches(arrow):
                writer = writer or arrow.ipc.new_file(copy.name, batch.schema)
                writer.write_batch(batch)
            assert writer is not None
            writer.close()
            # The name goes away here, the data with the process.
            return arrow.ipc.open_file(arrow.memory_map(copy.name))

    def _item(self, number: int, columns: dict[str, Column], row: int) -> RowItem:
        place = f"{self.path}, row {number + 1}"
        return RowItem(place=place, columns=columns, row=row, file_name=self.path.name.split(".")[0])

    def _batches(self, arrow: ModuleType) -> Iterator[Any]:
        """At most `ROWS` rows each."""
        size = self.path.stat().st_size
        if self._is_parquet:
            import pyarrow.parquet

            with pyarrow.parquet.ParquetFile(self.path) as file:
                for group in range(file.num_row_groups):
                    yield from file.iter_batches(batch_size=ROWS, row_groups=[group])
                    self.position = (group + 1) * size // file.num_row_groups
            return
        with arrow.memory_map(str(self.path)) as mapped:
            reader = arrow.ipc.open_stream(mapped) if self._is_stream else arrow.ipc.open_file(mapped)
            count = 0 if self._is_stream else reader.num_record_batches
            for batch in reader if self._is_stream else map(reader.get_batch, range(count)):
                for begin in range(0, batch.num_rows, ROWS):
                    yield batch.slice(begin, ROWS)
                self.position = mapped.tell()


def _columns(arrow: ModuleType, batch: Any) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        lists = _lists(arrow.types, column)
        columns[name] = column.to_pylist() if lists is None else lists
    return columns


def _lists(types: ModuleType, column: Any) -> _Lists | None:
    """Without a Python object a number; None if the column holds something else."""
    kind = column.type
    is_fixed = types.is_fixed_size_list(kind)
    if not (is_fixed or types.is_list(kind) or types.is_large_list(kind)):
        return None
    inner = kind.value_type
    if types.is_integer(inner) or types.is_floating(inner) or types.is_boolean(inner):
        # A null among numbers is reported as the entry that it is.
        values = None if column.values.null_count else column.values.to_numpy(zero_copy_only=False)
    else:
        values = _lists(types, column.values)
    if values is None:
        return None
    fixed = (column.offset + np.arange(len(column) + 1)) * kind.list_size if is_fixed else None
    offsets = column.offsets.to_numpy() if fixed is None else fixed
    return _Lists(values, offsets, column.is_valid().to_numpy(zero_copy_only=False))


@contextmanager
def _errors(path: Path) -> Iterator[ModuleType]:
    """pyarrow, with its errors naming the file."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.types
    except ImportError as error:
        raise ValueError(
            f"{path} is a parquet or arrow file. Install the reader: pip install 'harts[data]'."
        ) from error
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged or not supported ({str(error).splitlines()[0]}).") from error
