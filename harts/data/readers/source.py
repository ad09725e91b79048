"""Bytes of a file, through gzip or zstd, with the position in the file on disk."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def magic_of(path: Path) -> bytes:
    """The first 16 bytes, not decompressed.

    Raises:
        ValueError: If there is no such file, or it may not be read.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file. Give the path of a rollout file, or of a folder that holds some.")
    try:
        with path.open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error}).") from error


class Source:
    """A file opened for reading; gzip and zstd are found by content.

    Example:
        >>> with Source(Path("rollouts.jsonl.gz")).open() as file:  # doctest: +SKIP
        ...     file.readline()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.magic = magic_of(path)
        self._raw: BinaryIO | None = None

    @property
    def is_compressed(self) -> bool:
        """Whether reading at a position would mean decompressing everything before it."""
        return self.magic.startswith((GZIP_MAGIC, ZSTD_MAGIC))

    @property
    def position(self) -> int:
        """Bytes of the file on disk that were read so far."""
        return 0 if self._raw is None else self._raw.tell()

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The decompressed bytes.

        Raises:
            ValueError: While reading, if the compression is damaged.
        """
        with self.path.open("rb") as raw:
            self._raw = raw
            try:
                yield io.BufferedReader(_named(raw, self), buffer_size=1 << 20)
            finally:
                self._raw = None


class _Checked(io.RawIOBase):
    """Turns what damaged compression raises into a ValueError that names the file."""

    def __init__(self, file: IO[bytes], path: Path, errors: tuple[type[Exception], ...]) -> None:
        self._file, self._path, self._errors = file, path, errors
        self._read = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            size = cast(io.BufferedIOBase, self._file).readinto(buffer)
        except self._errors as error:
            raise ValueError(
                f"{self._path}: damaged after {self._read} bytes of content ({error}). Copy the file again."
            ) from error
        self._read += size
        return size


def _named(raw: BinaryIO, source: Source) -> io.RawIOBase:
    if source.magic.startswith(GZIP_MAGIC):
        stream = cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
        return _Checked(stream, source.path, (gzip.BadGzipFile, EOFError, zlib.error))
    if source.magic.startswith(ZSTD_MAGIC):
        try:
            import zstandard
        except ImportError as error:
            raise ValueError(
                f"{source.path} is compressed with zstd. Install it: pip install 'harts[data]'."
            ) from error
        stream = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return _Checked(cast("IO[bytes]", stream), source.path, (zstandard.ZstdError,))
    return _Checked(raw, source.path, (OSError,))
