"""One record of a file, and checks of its fields that name the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.data.trajectory import Trajectory

INT64 = np.iinfo(np.int64)
# Names that tools give to what all attempts at one task have in common.
GROUP_FIELDS = ("group_id", "task_id", "instance_id", "example_id", "problem_id", "prompt_id", "uid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one line, array element or row holds."""

    place: str
    """For messages: `rollouts.jsonl, line 3`."""
    fields: Mapping[str, Any]
    """JSON values; columnar files give NumPy arrays for columns of numbers."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """What the file states once for all of its records."""
    file_name: str = ""
    """Without folders and endings; some tools write the task's name only there."""


def short(value: Any) -> str:
    """For messages."""
    text = repr(_begin(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _begin(value: Any, depth: int = 0) -> Any:
    """Enough of it to be shortened; as lists, whether it was read into arrays or not."""
    if depth > 60:
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return value.item()
    if isinstance(value, dict):
        return {key: _begin(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, np.ndarray)):
        return [_begin(inner, depth + 1) for inner in value[:20]]
    return value[:20] if isinstance(value, str) else value


def group_field(record: Record) -> str | None:
    """The task as the record names it, or None."""
    for name in GROUP_FIELDS:
        value = record.fields.get(name)
        if isinstance(value, (str, int, np.integer)):
            # Half of a surrogate pair could not be printed.
            return str(value).encode("utf-8", "replace").decode("utf-8")
        # Columnar files hold a column of one number a row as an array without dimensions.
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu":
            return str(value.reshape(-1)[0])
    return None


def digest(ids: NDArray[np.int64] | bytes) -> str:
    """A name for a prompt that has none."""
    data = ids if isinstance(ids, bytes) else np.ascontiguousarray(ids, dtype=np.int64).tobytes()
    return "prompt " + blake2b(data, digest_size=6).hexdigest()


def integers(values: Any, name: str, place: str) -> NDArray[np.int64]:
    """A list or array of integers.

    Raises:
        ValueError: Naming place, field and the first bad entry.
    """
    array = _array(values, name, place, "integer")
    if array.dtype.kind in "iu" and (array.dtype != np.uint64 or not (array > INT64.max).any()):
        return array.astype(np.int64, copy=False)
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    bad = next(i for i, value in enumerate(values) if not is_integer(value))
    raise ValueError(f"{place}, field {name}: entry {bad} is {short(values[bad])}, expected an integer.")


def numbers(values: Any, name: str, place: str, *, length: int) -> NDArray[np.float64]:
    """As `integers`, of any numbers, `length` of them."""
    array = _array(values, name, place, "number", length=length)
    if array.dtype.kind in "iuf":
        return array.astype(np.float64, copy=False)
    if array.size == 0:
        return np.empty(0)
    bad = next((i for i, value in enumerate(values) if not is_number(value)), None)
    if bad is None:
        # Integers that fit into floats only.
        return np.array([float(value) for value in values])
    raise ValueError(f"{place}, field {name}: entry {bad} is {short(values[bad])}, expected a number.")


def flags(values: Any, name: str, place: str, *, length: int) -> NDArray[np.bool_]:
    """As `integers`, of 0 and 1, `length` of them."""
    array = _array(values, name, place, "number", length=length)
    if array.dtype.kind in "biuf":
        bad = np.flatnonzero((array != 0) & (array != 1))
        if not bad.size:
            return array.astype(bool, copy=False)
        at = int(bad[0])
    elif array.size == 0:
        return np.empty(0, dtype=bool)
    else:
        at = next(
            i for i, value in enumerate(values) if not isinstance(value, (bool, int, float)) or value not in (0, 1)
        )
    raise ValueError(f"{place}, field {name}: entry {at} is {short(values[at])}, expected 0 or 1.")


def _array(values: Any, name: str, place: str, kind: str, *, length: int | None = None) -> NDArray[Any]:
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise ValueError(f"{place}, field {name}: has shape {values.shape}, expected one {kind} a token.")
    count = "a list of integers" if length is None else f"a list of {length} {kind}s, one a token"
    if not isinstance(values, (list, np.ndarray)) or (length is not None and len(values) != length):
        got = f"{len(values)} entries" if isinstance(values, (list, np.ndarray)) else short(values)
        raise ValueError(f"{place}, field {name}: expected {count}, got {got}.")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        # Lists of different lengths inside, or integers of many digits.
        array = np.array([None] * len(values), dtype=object)
    return array if array.ndim == 1 else np.array([None] * len(values), dtype=object)


def is_integer(value: Any) -> bool:
    """Whether it fits into int64; bools do not count."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return whole and INT64.min <= int(value) <= INT64.max


def is_number(value: Any) -> bool:
    """Whether it fits into float64; bools do not count."""
    if isinstance(value, (float, np.floating)):
        return True
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and abs(int(value)) < 2**1023


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStreams:
    """What a token format found out about one sample; one entry a token everywhere."""

    token_ids: NDArray[np.int64]
    """[L]."""
    loss_mask: NDArray[np.bool_]
    """[L]."""
    advantages: NDArray[np.float64] | None = None
    """[L] or None, which counts as 0."""
    sampling_logprobs: NDArray[np.float64] | None = None
    """[L] or None."""
    ref_logprobs: NDArray[np.float64] | None = None
    """[L] or None."""

    def trajectory(self, place: str, *, temperature: float = 1.0) -> Trajectory:
        """Check what `TrajectoryBatch` would refuse later without knowing the place.

        Raises:
            ValueError: If there is no token, an id is negative, or a trained token has a NaN or an infinity.
        """
        if self.token_ids.size == 0:
            raise ValueError(f"{place}: the sample has no tokens. Remove it.")
        if self.token_ids.min() < 0:
            at = int(self.token_ids.argmin())
            raise ValueError(f"{place}: token {at} has the id {self.token_ids[at]}. Mask padding, or remove it.")
        mask = self.loss_mask.copy()
        # Nothing predicts the first token, so it cannot be trained whatever the file says.
        mask[0] = False
        for name in ("advantages", "sampling_logprobs", "ref_logprobs"):
            stream = getattr(self, name)
            if stream is None or np.isfinite(stream[mask]).all():
                continue
            at = int(np.flatnonzero(mask & ~np.isfinite(stream))[0])
            raise ValueError(f"{place}, {name}: {stream[at]} at the trained token {at}, expected a finite number.")
        if not (np.isfinite(temperature) and temperature > 0):
            raise ValueError(f"{place}, field temperature: got {temperature}, expected a number > 0.")
        return Trajectory(
            token_ids=self.token_ids,
            loss_mask=mask,
            advantages=np.zeros(mask.size) if self.advantages is None else self.advantages,
            sampling_logprobs=self.sampling_logprobs,
            ref_logprobs=self.ref_logprobs,
            temperature=temperature,
        )
