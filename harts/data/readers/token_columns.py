"""Rows with a column of token ids under a usual name, from parquet, arrow or JSON."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, TokenStreams, flags, group_field, integers, is_number, numbers
from harts.data.trajectory import Trajectory

IDS = ("input_ids", "tokens", "ids")
MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "response_mask", "completion_mask")
SAMPLING = ("sampling_logprobs", "rollout_log_probs", "old_log_probs", "logprobs")
REFERENCE = ("ref_logprobs", "ref_log_prob")
# What a label is where nothing is trained.
IGNORED = -100


def _find(record: Record, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if record.fields.get(name) is not None), None)


def _sample(record: Record) -> Trajectory:
    fields, place = record.fields, record.place
    name = _find(record, IDS)
    if name is None:
        raise ValueError(f"{place}: no column of token ids, expected one of {', '.join(IDS)}.")
    ids = integers(fields[name], name, place)
    real = np.ones(ids.size, dtype=bool)
    if fields.get("attention_mask") is not None:
        real = flags(fields["attention_mask"], "attention_mask", place, length=ids.size)

    def stream(column: str | None) -> NDArray[np.float64] | None:
        return None if column is None else numbers(fields[column], column, place, length=ids.size)[real]

    advantages = fields.get("advantages", fields.get("advantage"))
    if advantages is not None:
        scalar = is_number(advantages) or (isinstance(advantages, np.ndarray) and advantages.ndim == 0)
        values = np.full(ids.size, advantages) if scalar else advantages
        advantages = numbers(values, "advantages", place, length=ids.size)[real]
    return TokenStreams(
        token_ids=ids[real],
        loss_mask=_mask(record, ids.size)[real],
        advantages=advantages,
        sampling_logprobs=stream(_find(record, SAMPLING)),
        ref_logprobs=stream(_find(record, REFERENCE)),
    ).trajectory(place)


def _mask(record: Record, length: int) -> NDArray[np.bool_]:
    name = _find(record, MASKS)
    if name is not None:
        return flags(record.fields[name], name, record.place, length=length)
    labels = record.fields.get("labels")
    if labels is None:
        return np.ones(length, dtype=bool)
    values = integers(labels, "labels", record.place)
    if values.size != length:
        raise ValueError(f"{record.place}, field labels: expected {length} entries, one a token, got {values.size}.")
    return values != IGNORED


TOKEN_COLUMNS = ReaderFormat(
    name="tokens",
    holds="rows with token ids: input_ids, and loss_mask or labels",
    sniff=lambda record: isinstance(record.fields.get(_find(record, IDS) or ""), (list, np.ndarray)),
    names=lambda record: [group_field(record) or ""],
    reads_arrays=True,
    samples=lambda record: [_sample(record)],
)
