"""Tinker: a Datum is the input tokens, and for each the token that follows with its loss inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, TokenStreams, group_field, integers, numbers
from harts.data.trajectory import Trajectory


def _input(record: Record) -> NDArray[np.int64]:
    value, place = record.fields.get("model_input"), record.place
    chunks = value.get("chunks") if isinstance(value, dict) else [{"tokens": value}]
    if not isinstance(chunks, (list, np.ndarray)) or len(chunks) == 0:
        raise ValueError(f"{place}, field model_input: expected chunks of tokens.")
    parts = []
    for chunk in chunks:
        if not isinstance(chunk, dict) or "tokens" not in chunk:
            raise ValueError(f"{place}, field model_input: a chunk without tokens. Only text is supported.")
        parts.append(integers(chunk["tokens"], "model_input", place))
    return np.concatenate(parts)


def _data(value: Any) -> Any:
    """A TensorData holds a flat list beside its shape."""
    return value.get("data") if isinstance(value, dict) else value


def _sample(record: Record) -> Trajectory:
    place = record.place
    read = _input(record)
    inputs = record.fields.get("loss_fn_inputs")
    if not isinstance(inputs, dict):
        raise ValueError(f"{place}, field loss_fn_inputs: expected an object with target_tokens.")
    targets = integers(_data(inputs.get("target_tokens")), "target_tokens", place)
    if targets.size != read.size or read.size == 0 or (targets[:-1] != read[1:]).any():
        raise ValueError(
            f"{place}, field target_tokens: expected the {read.size} tokens of model_input moved by one, so that they "
            "are one sequence. Several targets a position are no trajectory."
        )

    def stream(name: str) -> NDArray[np.float64] | None:
        value = _data(inputs.get(name))
        if value is None:
            return None
        # Entry t speaks of the token that follows input token t.
        return np.concatenate([[0.0], numbers(value, name, place, length=read.size)])

    weights, mask, advantages, logprobs = map(stream, ("weights", "mask", "advantages", "logprobs"))
    # What was read carries zeros everywhere.
    said = [
        values != 0
        for values in ((mask,) if mask is not None else (weights, advantages, logprobs))
        if values is not None
    ]
    if not said:
        raise ValueError(f"{place}, field loss_fn_inputs: expected weights, mask, advantages or logprobs.")
    return TokenStreams(
        token_ids=np.concatenate([read[:1], targets]),
        loss_mask=np.logical_or.reduce(said),
        advantages=weights if advantages is None else advantages,
        sampling_logprobs=logprobs,
    ).trajectory(place)


TINKER = ReaderFormat(
    name="tinker",
    holds="Tinker datums: model_input and loss_fn_inputs",
    sniff=lambda record: "model_input" in record.fields and "loss_fn_inputs" in record.fields,
    names=lambda record: [group_field(record) or ""],
    reads_arrays=True,
    samples=lambda record: [_sample(record)],
)
