"""prime-rl: training samples (prompt and completion), and packed micro batches cut where positions begin again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, TokenStreams, flags, group_field, integers, is_number, numbers, short
from harts.data.trajectory import Trajectory

# TRL's padded batches have all but the last.
SAMPLE = ("prompt_mask", "completion_ids", "completion_mask", "completion_logprobs")
PACKED = ("input_ids", "loss_mask", "inference_logprobs")


def _sniff(record: Record) -> bool:
    return all(name in record.fields for name in SAMPLE) or all(name in record.fields for name in PACKED)


def _temperature(record: Record) -> float:
    value = record.fields.get("temperature")
    temperatures = record.fields.get("completion_temperatures", record.fields.get("temperatures"))
    if value is None and isinstance(temperatures, (list, np.ndarray)) and len(temperatures):
        every = numbers(temperatures, "temperatures", record.place, length=len(temperatures))
        if (every != every[0]).any():
            raise ValueError(f"{record.place}, field temperatures: more than one in a sample, expected all equal.")
        value = every[0]
    if value is None:
        return 1.0
    if not is_number(value):
        raise ValueError(f"{record.place}, field temperature: got {short(value)}, expected a number.")
    return float(value)


def _sample(record: Record) -> Trajectory:
    fields, place = record.fields, record.place
    prompt = integers(fields.get("prompt_ids"), "prompt_ids", place)
    completion = integers(fields.get("completion_ids"), "completion_ids", place)
    size = prompt.size + completion.size
    advantage = fields.get("advantage")
    if advantage is not None and not is_number(advantage):
        raise ValueError(f"{place}, field advantage: got {short(advantage)}, expected a number.")
    logprobs = fields.get("completion_logprobs")
    if logprobs is not None:
        values = numbers(logprobs, "completion_logprobs", place, length=completion.size)
        logprobs = np.concatenate([np.zeros(prompt.size), values])
    teacher = fields.get("teacher_logprobs")
    return TokenStreams(
        token_ids=np.concatenate([prompt, completion]),
        loss_mask=np.concatenate(
            [
                flags(fields.get("prompt_mask"), "prompt_mask", place, length=prompt.size),
                flags(fields.get("completion_mask"), "completion_mask", place, length=completion.size),
            ]
        ),
        advantages=None if advantage is None else np.full(size, float(advantage)),
        sampling_logprobs=logprobs,
        ref_logprobs=None if teacher is None else numbers(teacher, "teacher_logprobs", place, length=size),
    ).trajectory(place, temperature=_temperature(record))


def _samples(record: Record) -> list[Trajectory]:
    fields, place = record.fields, record.place
    if "input_ids" not in fields:
        return [_sample(record)]
    ids = integers(fields["input_ids"], "input_ids", place)
    mask = flags(fields.get("loss_mask"), "loss_mask", place, length=ids.size)
    streams = {
        name: numbers(fields[name], name, place, length=ids.size)
        for name in ("advantages", "inference_logprobs")
        if fields.get(name) is not None
    }
    bounds = [*_starts(record, ids.size), ids.size]
    temperature = _temperature(record)
    found = []
    for begin, end in pairwise(bounds):
        part = {name: values[begin:end] for name, values in streams.items()}
        found.append(
            TokenStreams(
                token_ids=ids[begin:end],
                loss_mask=mask[begin:end],
                advantages=part.get("advantages"),
                sampling_logprobs=part.get("inference_logprobs"),
            ).trajectory(place, temperature=temperature)
        )
    return found


def _starts(record: Record, length: int) -> list[int]:
    positions = record.fields.get("position_ids")
    if positions is None:
        return [0]
    at = integers(positions, "position_ids", record.place)
    if at.size != length or (length and at[0] != 0):
        raise ValueError(
            f"{record.place}, field position_ids: expected {length} entries, one a token, that begin with 0."
        )
    return np.flatnonzero(at == 0).tolist() or [0]


def _names(record: Record) -> list[str]:
    count = 1
    if "input_ids" in record.fields:
        count = len(_starts(record, len(integers(record.fields["input_ids"], "input_ids", record.place))))
    return [group_field(record) or ""] * count


PRIME_RL = ReaderFormat(
    name="prime-rl",
    holds="prime-rl samples: prompt_ids, prompt_mask, completion_ids, completion_mask, completion_logprobs",
    sniff=_sniff,
    names=_names,
    samples=_samples,
    reads_arrays=True,
)
