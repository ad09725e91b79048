"""Tree shapes without tokens: lengths, common prefixes with the trajectory before, trained spans.

One object a line is one group. The two lists fix the group's prefix tree; groups share nothing with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.data.readers.format import ReaderFormat
from harts.data.readers.json_records import JsonRecords
from harts.data.readers.record import Record
from harts.data.readers.shape import GroupShape


def read_shapes(path: str | Path) -> Iterator[GroupShape]:
    """Stream the groups of a shapes file.

    Args:
        path: Of a .jsonl or .jsonl.gz file with `length`, `lcp` and optionally `loss_spans` and `task` a line.

    Raises:
        ValueError: Naming file, line and field.
    """
    for item in JsonRecords(Path(path)):
        yield parse_shape(item.load())


def parse_shape(record: Record) -> GroupShape:
    """One record.

    Raises:
        ValueError: Naming place and field.
    """
    fields, place = record.fields, record.place
    length_N, lcp_N = (_integers(fields, name, place) for name in ("length", "lcp"))
    _check(length_N, lcp_N, place)
    return GroupShape(
        name=str(fields.get("task", "")),
        length_N=length_N,
        lcp_N=lcp_N,
        loss_spans=_spans(fields.get("loss_spans"), length_N, place),
    )


def _integers(fields: Mapping[str, Any], name: str, place: str) -> NDArray[np.int64]:
    values = fields.get(name)
    if not (isinstance(values, list) and values and all(type(v) is int and abs(v) < 2**62 for v in values)):
        raise ValueError(f"{place}, field {name}: expected a list of at least one integer, got {_short(values)}.")
    return np.array(values, dtype=np.int64)


def _check(length_N: NDArray[np.int64], lcp_N: NDArray[np.int64], place: str) -> None:
    if lcp_N.size != length_N.size:
        raise ValueError(f"{place}, field lcp: {lcp_N.size} entries for {length_N.size} lengths. Give one each.")
    if length_N.min() < 1:
        raise ValueError(f"{place}, field length: entry {length_N.argmin()} is {length_N.min()}, expected at least 1.")
    limit_N = np.minimum(length_N, np.concatenate([[0], length_N[:-1]]))
    # A trajectory that is a prefix of the one before would have been sorted before it.
    limit_N[1:] -= length_N[1:] < length_N[:-1]
    bad = np.flatnonzero((lcp_N < 0) | (lcp_N > limit_N))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"{place}, field lcp: entry {i} is {lcp_N[i]}, expected 0 to {limit_N[i]}. "
            "Sort the trajectories, a prefix before what it begins, and compare each with the one before."
        )


def _spans(value: Any, length_N: NDArray[np.int64], place: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    if value is None:
        return tuple(((1, int(length)),) if length > 1 else () for length in length_N)
    if not isinstance(value, list) or len(value) != length_N.size:
        raise ValueError(f"{place}, field loss_spans: expected {length_N.size} lists of spans, got {_short(value)}.")
    for i, (spans, length) in enumerate(zip(value, length_N.tolist(), strict=True)):
        for span in spans if isinstance(spans, list) else [spans]:
            good = isinstance(span, list) and len(span) == 2 and all(type(v) is int for v in span)
            # Position 0 has no predictor, so it cannot be trained.
            if not (good and 0 < span[0] <= span[1] <= length):
                raise ValueError(
                    f"{place}, field loss_spans: entry {i} holds {_short(span)}, expected [begin, end] with "
                    f"1 <= begin <= end <= {length}."
                )
    return tuple(tuple((begin, end) for begin, end in spans) for spans in value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


SHAPES = ReaderFormat(
    name="shapes",
    holds="tree shapes without tokens: length and lcp",
    sniff=lambda record: "length" in record.fields and "lcp" in record.fields,
    # Each is a group of its own, whatever their names.
    names=lambda record: [""],
    samples=lambda record: [parse_shape(record)],
)
