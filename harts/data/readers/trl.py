"""TRL: what a `rollout_func` of GRPOTrainer returns, and rows or padded batches with the same fields.

A record is one rollout, or a dictionary of lists with one entry a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import (
    Record,
    TokenStreams,
    digest,
    flags,
    group_field,
    integers,
    is_number,
    numbers,
)
from harts.data.trajectory import Trajectory

# Each says of completion tokens whether the policy wrote them.
MASKS = ("env_mask", "tool_mask", "completion_mask")
SAMPLING = ("logprobs", "sampling_per_token_logps", "old_per_token_logps")
REFERENCE = "ref_per_token_logps"


def _rows(record: Record) -> list[Record]:
    """A record for each rollout."""
    prompts = record.fields.get("prompt_ids")
    if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], (list, np.ndarray))):
        return [record]
    count = len(prompts)
    lists = {
        name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in record.fields.items()
    }
    columns = {name: values for name, values in lists.items() if isinstance(values, list) and len(values) == count}
    if "completion_ids" not in columns:
        raise ValueError(f"{record.place}, field completion_ids: expected {count} lists, one for each of prompt_ids.")
    return [
        Record(
            place=f"{record.place}, rollout {i + 1}",
            fields={name: values[i] for name, values in columns.items() if values[i] is not None},
        )
        for i in range(count)
    ]


def _prompt(record: Record) -> NDArray[np.int64]:
    ids = integers(record.fields.get("prompt_ids"), "prompt_ids", record.place)
    mask = record.fields.get("prompt_mask")
    return ids if mask is None else ids[flags(mask, "prompt_mask", record.place, length=ids.size)]


def _sample(record: Record) -> Trajectory:
    fields, place = record.fields, record.place
    prompt = _prompt(record)
    completion = integers(fields.get("completion_ids"), "completion_ids", place)
    masks = {
        name: flags(fields[name], name, place, length=completion.size) for name in MASKS if fields.get(name) is not None
    }
    trained = np.ones(completion.size, dtype=bool)
    for mask in masks.values():
        trained &= mask
    # In padded batches what is not in the mask of the completion is padding; tool results are in it.
    real = masks.get("completion_mask", np.ones(completion.size, dtype=bool))
    if "prompt_mask" not in fields:
        real = np.ones(completion.size, dtype=bool)

    def stream(name: str | None) -> NDArray[np.float64] | None:
        if name is None or fields.get(name) is None:
            return None
        values = numbers(_sampled(fields[name]), name, place, length=completion.size)
        return np.concatenate([np.zeros(prompt.size), values[real]])

    return TokenStreams(
        token_ids=np.concatenate([prompt, completion[real]]),
        loss_mask=np.concatenate([np.zeros(prompt.size, dtype=bool), trained[real]]),
        advantages=_advantages(fields, place, prompt.size, real),
        sampling_logprobs=stream(next((name for name in SAMPLING if fields.get(name) is not None), None)),
        ref_logprobs=stream(REFERENCE),
    ).trajectory(place)


def _sampled(values: Any) -> Any:
    """Engines that return several candidates a token put the sampled one first."""
    kinds = (list, np.ndarray)
    if isinstance(values, list) and values and all(isinstance(value, kinds) and len(value) for value in values):
        return [value[0] for value in values]
    return values


def _advantages(
    fields: Mapping[str, Any], place: str, prompt: int, real: NDArray[np.bool_]
) -> NDArray[np.float64] | None:
    value = fields.get("advantages", fields.get("advantage"))
    if value is None:
        return None
    if is_number(value) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return np.full(prompt + int(real.sum()), float(value))
    values = numbers(value, "advantages", place, length=real.size)
    return np.concatenate([np.zeros(prompt), values[real]])


def _names(record: Record) -> list[str]:
    return [group_field(row) or digest(_prompt(row)) for row in _rows(record)]


TRL = ReaderFormat(
    name="trl",
    holds="TRL rollouts: prompt_ids, completion_ids, logprobs, env_mask",
    sniff=lambda record: "prompt_ids" in record.fields and "completion_ids" in record.fields,
    names=_names,
    reads_arrays=True,
    samples=lambda record: [_sample(row) for row in _rows(record)],
)
