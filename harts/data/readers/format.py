"""What a format has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harts.data.messages import MessageLog
from harts.data.readers.record import Record
from harts.data.readers.shape import GroupShape
from harts.data.trajectory import Trajectory

Sample = Trajectory | MessageLog | GroupShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ReaderFormat:
    """How to recognise a format and what its records hold; lines, array elements and rows are all records."""

    name: str
    """For `read(..., format=...)`."""
    holds: str
    """In a few words, for messages."""
    sniff: Callable[[Record], bool]
    """Whether the first good record of a file looks like this format. Never raises."""
    names: Callable[[Record], Sequence[str]]
    """The task of every sample of a record, in order. May raise a ValueError that names the place."""
    samples: Callable[[Record], Sequence[Sample]]
    """The samples of a record. May raise a ValueError that names place and field."""
    needs_tokenizer: bool = False
    """Whether records hold messages."""
    reads_arrays: bool = False
    """Whether `names` and `samples` take NumPy arrays for long lists of numbers or of true and false."""
    quick_name: Callable[[bytes], str | None] | None = None
    """The task of a record of one sample from its JSON text, where that is much quicker; it may not know."""
