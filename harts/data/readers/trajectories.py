"""Our own format: one trajectory an object a line, with the fields of `Trajectory`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np

from harts.data.readers.lines import open_text, read_objects
from harts.data.trajectory import Trajectory

FIELDS = tuple(f.name for f in dataclass_fields(Trajectory))
STREAMS = ("loss_mask", "advantages", "sampling_logprobs", "ref_logprobs", "share_key", "routes")
INTEGER_FIELDS = ("token_ids", "share_key")


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Stream the trajectories of a file. Only `token_ids` is required; defaults are those of `Trajectory.of`.

    Args:
        path: Of a .jsonl or .jsonl.gz file.

    Raises:
        ValueError: Naming file, line and field. What needs the whole step (a stream that only some trajectories
            have, say) is checked by `TrajectoryBatch.of`.

    Example of a line:
        {"token_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "advantages": 0.5, "group_id": 3}
    """
    for place, fields in read_objects(Path(path)):
        _check(fields, place)
        yield Trajectory.of(fields.pop("token_ids"), **fields)


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


def _check(fields: dict[str, Any], place: str) -> None:
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"{place}, field {unknown[0]}: unknown. Fields are {', '.join(FIELDS)}.")
    ids = fields.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{place}, field token_ids: expected a list of at least one integer.")
    for name in ("token_ids", *(s for s in STREAMS if s in fields)):
        values = fields[name]
        if name == "routes" and isinstance(values, list) and _is_choices(values, len(ids)):
            continue
        if name == "advantages" and _is_number(values):
            continue
        if name == "routes":
            raise ValueError(f"{place}, field routes: expected {len(ids)} lists of as many lists of integers each.")
        if not isinstance(values, list) or len(values) != len(ids):
            raise ValueError(f"{place}, field {name}: expected a list of {len(ids)} numbers, one a token.")
        fits = _is_integer if name in INTEGER_FIELDS else _is_flag if name == "loss_mask" else _is_number
        bad = next((i for i, value in enumerate(values) if not fits(value)), None)
        if bad is not None:
            kind = "an integer" if name in INTEGER_FIELDS else "0 or 1" if name == "loss_mask" else "a number"
            raise ValueError(f"{place}, field {name}: entry {bad} is {values[bad]!r}, expected {kind}.")
    if "group_id" in fields and not _is_integer(fields["group_id"]):
        raise ValueError(f"{place}, field group_id: got {fields['group_id']!r}, expected an integer.")
    for name in ("temperature", "weight"):
        if name in fields and not _is_number(fields[name]):
            raise ValueError(f"{place}, field {name}: got {fields[name]!r}, expected a number.")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_choices(values: list[Any], length: int) -> bool:
    """Whether it is an array of three axes, one row a token."""
    if len(values) != length or not all(isinstance(layers, list) and layers for layers in values):
        return False
    choices = [experts for layers in values for experts in layers]
    if not all(isinstance(experts, list) and experts for experts in choices):
        return False
    sizes = {len(layers) for layers in values}, {len(experts) for experts in choices}
    return all(len(size) == 1 for size in sizes) and all(_is_integer(e) for experts in choices for e in experts)


def _is_flag(value: Any) -> bool:
    return type(value) in (int, bool, float) and value in (0, 1)
