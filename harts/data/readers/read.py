"""One function for every format: a file in, its groups out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from harts.data.group import RolloutGroup
from harts.data.readers.lines import read_objects
from harts.data.readers.shapes import GroupShape, read_shapes
from harts.data.readers.trajectories import read_trajectories

if TYPE_CHECKING:
    from harts.data.rendering import Tokenizer

KEPT_MESSAGES = 5


@dataclass(kw_only=True, slots=True)
class SkippedLines:
    """Counts damaged records instead of raising.

    Example:
        >>> skipped = SkippedLines()
        >>> groups = list(read("rollouts.jsonl", skip_bad=skipped))  # doctest: +SKIP
        >>> skipped.count
        0
    """

    count: int = 0
    """Records skipped so far."""
    messages: list[str] = field(default_factory=list)
    """What was wrong with the first few."""

    def add(self, error: ValueError) -> None:
        """Count one record."""
        self.count += 1
        if len(self.messages) < KEPT_MESSAGES:
            self.messages.append(str(error))


def read(
    path: str | Path,
    *,
    format: str | None = None,
    samples: str = "final",
    tokenizer: Tokenizer | None = None,
    skip_bad: SkippedLines | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[RolloutGroup | GroupShape]:
    """Stream the groups of a file.

    Args:
        path: Of the file.
        format: Name of the format; None finds it by content.
        samples: How message logs become trajectories; token formats are read as they are.
        tokenizer: For message logs.
        skip_bad: Counts damaged records; None raises at the first.
        progress: Called with the number of bytes read so far.

    Raises:
        ValueError: Naming file, line and field.
    """
    path = Path(path)
    first = next((fields for _, fields in read_objects(path)), None)
    if first is None:
        raise ValueError(f"{path} is empty, expected one trajectory or one group a line.")
    if "token_ids" in first:
        for group_id, trajectories in groupby(read_trajectories(path), key=lambda t: t.group_id):
            yield RolloutGroup(name=str(group_id), trajectories=tuple(trajectories))
    elif "length" in first:
        yield from read_shapes(path)
    else:
        raise ValueError(
            f"{path}, line 1: fields {', '.join(sorted(first)) or 'none'}, expected token_ids (trajectories) or "
            "length and lcp (shapes)."
        )
