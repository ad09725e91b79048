"""JSON records of a file: a line each, or the elements of an array inside a document, without loading the file.

A document is cut into elements by its strings and brackets alone; each element is parsed by itself, so memory is
bounded by one of them.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from harts.data.readers.number_arrays import parse_object
from harts.data.readers.record import Record
from harts.data.readers.source import Source

MAX_RECORD_BYTES = 1 << 30
# A first line longer than this counts as a document.
MAX_FIRST_LINE = 1 << 26
SMALL_COPY = 1 << 20
"""Bytes of decompressed text that stay in memory instead of going to the disk."""
KEPT_AFTER = 1 << 26
"""Bytes decompressed to read records of one file by number, after which the decompressed copy is kept."""
CHUNK = 1 << 20
BOM = b"\xef\xbb\xbf"
BLANK = b" \t\r\n,"
# Documents that are one object hold their records in one of these arrays, or are themselves one record.
RECORD_ARRAYS = (b'"simulations"', b'"attempts"')
# A whole string, a bracket, or the quote of a string that goes on after the buffer.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]|"', re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonItem:
    """A record that was not parsed yet."""

    place: str
    """For messages."""
    data: bytes
    """JSON."""
    shared: dict[str, Any]
    """As in `Record`."""
    file_name: str
    """As in `Record`."""

    def load(self, *, as_arrays: bool = False) -> Record:
        """Parse it.

        Args:
            as_arrays: Whether long arrays of numbers become NumPy arrays, as in `parse_object`.

        Raises:
            ValueError: If it is no JSON object. A list counts as a list of messages.
        """
        value: Any = parse_object(self.data) if as_arrays else None
        if value is None:
            value = parse_json(self.data, self.place)
        if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
            value = {"messages": value}
        if not isinstance(value, dict):
            raise ValueError(
                f"{self.place}: got a {type(value).__name__}, expected an object. Write one object a line."
            )
        return Record(place=self.place, fields=value, shared=self.shared, file_name=self.file_name)


def parse_json(data: bytes, place: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: Naming the place.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: no JSON ({error}). Expected one object a line, in UTF-8.") from error


class JsonRecords:
    """The records of a JSON or JSONL file, in order; after one pass also by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._source = Source(path)
        self._stem = re.sub(r"(\.traj)?(\.jsonl?)?(\.gz|\.zst)?$", "", path.name)
        with self._source.open() as file:
            self._is_document = _is_document(file)
        self._shared: dict[str, Any] = {}
        self._offsets, self._sizes, self._labels = array("q"), array("q"), array("q")
        self._unpacked: BinaryIO | None = None
        self._decompressed = 0

    @property
    def position(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return self._source.position

    def __iter__(self) -> Iterator[JsonItem]:
        self._offsets, self._sizes, self._labels = array("q"), array("q"), array("q")
        with self._source.open() as file:
            for label, data, offset in self._elements(file) if self._is_document else _lines(file, self.path):
                self._offsets.append(offset)
                self._sizes.append(len(data))
                self._labels.append(label)
                yield self._item(label, data)

    def at(self, numbers: Iterable[int]) -> Iterator[JsonItem]:
        """Records by their number in the last pass. A compressed file is decompressed for that, at most a few times."""
        access = self._unpacked or _random_access(self._source)
        if self._source.is_compressed and self._unpacked is None:
            # Folders may hold more files than can be open at once, so a copy is kept only where it saves much.
            self._decompressed += access.tell()
            if self._decompressed > KEPT_AFTER:
                self._unpacked = access
        try:
            for number in numbers:
                access.seek(self._offsets[number])
                yield self._item(self._labels[number], access.read(self._sizes[number]))
        finally:
            if access is not self._unpacked:
                access.close()

    def _item(self, label: int, data: bytes) -> JsonItem:
        place = f"{self.path}, {'record' if self._is_document else 'line'} {label}"
        return JsonItem(place=place, data=data, shared=self._shared, file_name=self._stem)

    def _elements(self, file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
        for number, (data, offset, head) in enumerate(_split(_Scanner(file, self.path)), start=1):
            if number == 1 and head:
                self._shared = parse_json(head + b"null}", f"{self.path}, before the first record")
            yield number, data, offset


def _random_access(source: Source) -> BinaryIO:
    if not source.is_compressed:
        return source.path.open("rb")
    # Without a name: it goes away with the process, however that ends.
    copy = cast(BinaryIO, tempfile.SpooledTemporaryFile(max_size=SMALL_COPY))  # noqa: SIM115
    with source.open() as content:
        shutil.copyfileobj(content, copy, CHUNK)
    return copy


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes, int]]:
    offset, number = 0, 0
    while line := file.readline(MAX_RECORD_BYTES):
        number += 1
        if len(line) == MAX_RECORD_BYTES:
            raise ValueError(f"{path}, line {number}: more than {MAX_RECORD_BYTES} bytes. Write one object a line.")
        skipped = len(BOM) if number == 1 and line.startswith(BOM) else 0
        if not line[skipped:].isspace() and len(line) > skipped:
            yield number, line[skipped:], offset + skipped
        offset += len(line)


def _is_document(file: BinaryIO) -> bool:
    """Is the file one JSON value, or one a line?"""
    first = file.readline(MAX_FIRST_LINE).removeprefix(BOM)
    while first and not first.strip() and len(first) < MAX_FIRST_LINE:
        first = file.readline(MAX_FIRST_LINE)
    if len(first) == MAX_FIRST_LINE:
        return True
    rest, at_start = [], True
    for _ in range(20):
        line = file.readline(CHUNK)
        if at_start and line.strip():
            rest.append(line)
        at_start = line.endswith(b"\n")  # of a longer line, only the beginning counts
    value = _value(first)
    if value is None:
        # Damaged, or the beginning of an indented document.
        return first[:1] in (b"[", b"{") and not any(line[:1] in b"[{" and _value(line) is not None for line in rest)
    if rest:
        return False
    if isinstance(value, dict):
        return any(isinstance(value.get(name[1:-1].decode()), list) for name in RECORD_ARRAYS)
    return not _is_message(value[0] if value else None)


def _value(line: bytes) -> dict[str, Any] | list[Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


class _Scanner:
    """Strings and brackets of a stream, and the bytes between any two places after `keep`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._buffer, self._base = b"", 0
        self.position = 0
        self.keep = 0
        self.is_pinned = False

    def token(self) -> tuple[str, int, int] | None:
        """The next one with its [begin, end); None at the end of the file."""
        while True:
            found = TOKEN.search(self._buffer, self.position - self._base)
            if found is not None:
                character = chr(self._buffer[found.start()])
                if character != '"' or found.end() - found.start() > 1:
                    self.position = self._base + found.end()
                    return character, self._base + found.start(), self.position
            self.position = self._base + (len(self._buffer) if found is None else found.start())
            if not self._read():
                self.position = self._base + len(self._buffer)
                return None

    def release(self, place: int) -> None:
        """Nothing before `place` will be asked for, unless the scanner is pinned."""
        if not self.is_pinned:
            self.keep = place

    def bytes_between(self, begin: int, end: int) -> bytes:
        """Of the file; `begin` not before `keep`."""
        return self._buffer[begin - self._base : end - self._base]

    def stripped(self, begin: int, end: int) -> tuple[bytes, int]:
        """As `bytes_between` without what stands between records, and where it begins."""
        data = self.bytes_between(begin, end)
        kept = data.removeprefix(BOM).lstrip(BLANK)
        return kept.rstrip(BLANK), begin + len(data) - len(kept)

    def _read(self) -> bool:
        kept = self._buffer[self.keep - self._base :]
        if len(kept) > MAX_RECORD_BYTES:
            raise ValueError(f"{self._path}: a record of more than {MAX_RECORD_BYTES} bytes. Write one object a line.")
        # As much as is there already, so that long records are looked at a bounded number of times.
        more = self._file.read(max(CHUNK, len(kept)))
        self._buffer, self._base = kept + more, self.keep
        return bool(more)


def _split(scanner: _Scanner) -> Iterator[tuple[bytes, int, bytes]]:
    """Data and offset of every record; with each the beginning of an object that holds the array of the records."""
    depth, begin, last = 0, 0, b""
    while (token := scanner.token()) is not None:
        character, start, end = token
        if depth == 0 and character == "[":
            yield from _of_array(scanner, start)
            begin = scanner.keep = scanner.position
        elif depth == 1 and character == "[" and last in RECORD_ARRAYS:
            head = scanner.bytes_between(begin, start).removeprefix(BOM)
            yield from ((data, offset, head) for data, offset in _elements(scanner))
            return
        elif character == '"':
            last = scanner.bytes_between(start, end) if depth == 1 and end - start < 100 else b""
        else:
            depth += 1 if character in "[{" else -1
            if depth <= 0:
                yield *scanner.stripped(begin, end), b""
                depth, begin, scanner.keep = 0, end, end
    rest, offset = scanner.stripped(begin, scanner.position)
    if rest:
        yield rest, offset, b""


def _of_array(scanner: _Scanner, start: int) -> Iterator[tuple[bytes, int, bytes]]:
    """The elements, or the whole array if it is a list of messages."""
    scanner.keep, scanner.is_pinned = start, True
    elements = _elements(scanner)
    first = next(elements, None)
    if first is None:
        scanner.is_pinned = False
        return
    if _is_message(_value(first[0])):
        for _ in elements:
            pass
        yield scanner.bytes_between(start, scanner.position), start, b""
        scanner.is_pinned = False
        return
    scanner.is_pinned = False
    scanner.release(scanner.position)
    yield *first, b""
    yield from ((data, offset, b"") for data, offset in elements)


def _elements(scanner: _Scanner) -> Iterator[tuple[bytes, int]]:
    """Data and offset of the elements from here to the end of the array. What is no object or list comes, too."""
    depth, begin = 0, scanner.position
    scanner.release(begin)
    while (token := scanner.token()) is not None:
        character, start, end = token
        if character == '"':
            continue
        if depth == 0 and character == "]":
            scalar, offset = scanner.stripped(begin, start)
            if scalar:
                yield scalar, offset
            return
        depth += 1 if character in "[{" else -1
        if depth <= 0:
            yield scanner.stripped(begin, end)
            depth, begin = 0, end
            scanner.release(end)
    # The array is not closed: a damaged record, even if nothing follows.
    yield scanner.stripped(begin, scanner.position)
