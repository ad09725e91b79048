"""verl: rows of a DataProto batch: left-padded prompts, right-padded responses, one attention mask over both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, TokenStreams, digest, flags, group_field, integers, numbers
from harts.data.trajectory import Trajectory

SAMPLING = ("rollout_log_probs", "old_log_probs")
REFERENCE = "ref_log_prob"


def _parts(record: Record) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Prompt and response with padding, and which of their tokens are real."""
    fields, place = record.fields, record.place
    response = integers(fields.get("responses"), "responses", place)
    if "prompts" in fields:
        prompt = integers(fields["prompts"], "prompts", place)
    else:
        both = integers(fields.get("input_ids"), "input_ids", place)
        prompt = both[: both.size - response.size]
    length = prompt.size + response.size
    real = flags(fields.get("attention_mask"), "attention_mask", place, length=length)
    before, after = real[: prompt.size], real[prompt.size :]
    if (before[:-1] & ~before[1:]).any() or (~after[:-1] & after[1:]).any():
        raise ValueError(
            f"{place}, field attention_mask: expected zeros, the prompt, the response, zeros, with {prompt.size} "
            "entries for the prompt. Other padding is not supported."
        )
    return prompt, response, before, after


def _sample(record: Record) -> Trajectory:
    fields, place = record.fields, record.place
    prompt, response, before, after = _parts(record)
    trained = after
    if "response_mask" in fields:
        trained = after & flags(fields["response_mask"], "response_mask", place, length=response.size)

    def stream(name: str | None) -> NDArray[np.float64] | None:
        if name is None or name not in fields:
            return None
        values = numbers(fields[name], name, place, length=response.size)
        return np.concatenate([np.zeros(int(before.sum())), values[after]])

    return TokenStreams(
        token_ids=np.concatenate([prompt[before], response[after]]),
        loss_mask=np.concatenate([np.zeros(int(before.sum()), dtype=bool), trained[after]]),
        advantages=stream("advantages"),
        sampling_logprobs=stream(next((name for name in SAMPLING if name in fields), None)),
        ref_logprobs=stream(REFERENCE),
    ).trajectory(place)


def _names(record: Record) -> list[str]:
    named = group_field(record)
    if named is None:
        prompt, _, before, _ = _parts(record)
        named = digest(prompt[before])
    return [named]


VERL = ReaderFormat(
    name="verl",
    holds="verl batches: prompts, responses, attention_mask, response_mask, rollout_log_probs",
    sniff=lambda record: "responses" in record.fields and "attention_mask" in record.fields,
    names=_names,
    reads_arrays=True,
    samples=lambda record: [_sample(record)],
)
