"""tau-bench results: a list of runs, each with its messages in `traj`."""

from __future__ import annotations

from harts.data.messages import MessageLog, parse_messages
from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, group_field


def _task(record: Record) -> str:
    return group_field(record) or ""


def _log(record: Record) -> MessageLog:
    messages = parse_messages(record.fields.get("traj"), record.place, name="traj")
    return MessageLog(place=record.place, task=_task(record), messages=messages)


TAU_BENCH = ReaderFormat(
    name="tau-bench",
    holds="tau-bench results: task_id, traj",
    sniff=lambda record: isinstance(record.fields.get("traj"), list),
    names=lambda record: [_task(record)],
    samples=lambda record: [_log(record)],
    needs_tokenizer=True,
)
