"""Our own format: one trajectory an object a line, with the fields of `Trajectory`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.data.batch import check_trajectory
from harts.data.readers.format import ReaderFormat
from harts.data.readers.json_records import JsonRecords
from harts.data.readers.lines import open_text
from harts.data.readers.record import Record, flags, integers, is_integer, is_number, numbers, short
from harts.data.trajectory import Trajectory

FIELDS = tuple(f.name for f in dataclass_fields(Trajectory))
STREAMS = ("advantages", "sampling_logprobs", "ref_logprobs")
# All values of a good line are numbers, so this text cannot stand inside one.
GROUP_FIELD = b'"group_id"'
GROUP_ID = re.compile(rb"\s*:\s*(-?[0-9]{1,19})\b(?![.eE])")


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Stream the trajectories of a file. Only `token_ids` is required; defaults are those of `Trajectory.of`.

    Args:
        path: Of a .jsonl file, plain or compressed.

    Raises:
        ValueError: Naming file, line and field. What needs the whole step (a stream that only some trajectories
            have, say) is checked by `TrajectoryBatch.of`.

    Example of a line:
        {"token_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "advantages": 0.5, "group_id": 3}
    """
    for item in JsonRecords(Path(path)):
        yield parse_trajectory(item.load(as_arrays=True))


def parse_trajectory(record: Record) -> Trajectory:
    """One record.

    Raises:
        ValueError: Naming place and field.
    """
    fields, place = record.fields, record.place
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"{place}, field {unknown[0]}: unknown. Fields are {', '.join(FIELDS)}.")
    ids = integers(fields.get("token_ids", []), "token_ids", place)
    if ids.size == 0:
        raise ValueError(f"{place}, field token_ids: expected a list of at least one integer.")
    trajectory = Trajectory.of(ids, **_streams(fields, place, ids.size), **_scalars(fields, place))
    try:
        check_trajectory(trajectory)
    except ValueError as error:
        # Later checks could not name the place.
        raise ValueError(f"{place}: {str(error).replace('Trajectory 0', 'the trajectory', 1)}") from error
    return trajectory


def _streams(fields: Mapping[str, Any], place: str, length: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "loss_mask" in fields:
        values["loss_mask"] = flags(fields["loss_mask"], "loss_mask", place, length=length)
    for name in STREAMS:
        if name in fields:
            value = fields[name]
            scalar = name == "advantages" and is_number(value)
            values[name] = float(value) if scalar else numbers(value, name, place, length=length)
    if "share_key" in fields:
        values["share_key"] = integers(fields["share_key"], "share_key", place)
        if values["share_key"].size != length:
            raise ValueError(f"{place}, field share_key: expected a list of {length} numbers, one a token.")
    if "routes" in fields:
        values["routes"] = _routes(fields["routes"], place, length)
    return values


def _routes(value: Any, place: str, length: int) -> NDArray[np.int32]:
    """[L, M, A] recorded experts."""
    try:
        array = np.array(value)
    except ValueError:  # lists of different lengths
        array = np.empty(0)
    limits = np.iinfo(np.int32)
    fits = array.ndim == 3 and array.shape[0] == length and array.dtype.kind == "i"
    if not fits or array.size == 0 or array.min() < limits.min or array.max() > limits.max:
        raise ValueError(f"{place}, field routes: expected {length} lists of as many lists of integers each.")
    return array.astype(np.int32)


def _scalars(fields: Mapping[str, Any], place: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if "group_id" in fields:
        if not is_integer(fields["group_id"]):
            raise ValueError(f"{place}, field group_id: got {short(fields['group_id'])}, expected an integer.")
        values["group_id"] = int(fields["group_id"])
    for name in ("temperature", "weight"):
        if name in fields:
            if not is_number(fields[name]):
                raise ValueError(f"{place}, field {name}: got {short(fields[name])}, expected a number.")
            values[name] = float(fields[name])
    return values


def _name(record: Record) -> list[str]:
    group = record.fields.get("group_id", 0)
    return [str(int(group)) if is_integer(group) else ""]


def _quick_name(data: bytes) -> str | None:
    """Without parsing the tokens, which would take most of the time of a first pass."""
    if b"\\" in data:
        # The field's name could be written with escapes.
        return None
    place = data.rfind(GROUP_FIELD)
    while place >= 0:
        found = GROUP_ID.match(data, place + len(GROUP_FIELD))
        if found is not None:
            return str(int(found[1]))
        place = data.rfind(GROUP_FIELD, 0, place)
    return "0"


TRAJECTORIES = ReaderFormat(
    name="trajectories",
    holds="our own trajectories: token_ids and the other fields of Trajectory",
    sniff=lambda record: "token_ids" in record.fields,
    names=_name,
    reads_arrays=True,
    samples=lambda record: [parse_trajectory(record)],
    quick_name=_quick_name,
)


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """Write what `read_trajectories` reads; numbers survive exactly."""
    with open_text(Path(path), "wt") as file:
        for trajectory in trajectories:
            values = {name: _plain(getattr(trajectory, name)) for name in FIELDS}
            kept = {name: value for name, value in values.items() if value is not None}
            file.write(json.dumps(kept, separators=(",", ":")) + "\n")


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    return (value.astype(int) if value.dtype == bool else value).tolist()
