"""mini-swe-agent `.traj.json` files: `messages` and `info`."""

from __future__ import annotations

from harts.data.messages import MessageLog, parse_messages
from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, group_field

# Written when the run ends, never sent to the policy.
EXIT = "exit"


def _task(record: Record) -> str:
    info = record.fields.get("info")
    inside = info.get("instance_id") if isinstance(info, dict) else None
    return group_field(record) or (inside if isinstance(inside, str) else record.file_name)


def _sniff(record: Record) -> bool:
    info = record.fields.get("info")
    form = record.fields.get("trajectory_format")
    named = isinstance(form, str) and form.startswith("mini-swe-agent")
    return isinstance(record.fields.get("messages"), list) and (
        named or (isinstance(info, dict) and ("mini_version" in info or "submission" in info))
    )


def _log(record: Record) -> MessageLog:
    values = record.fields.get("messages")
    if isinstance(values, list):
        values = [value for value in values if not (isinstance(value, dict) and value.get("role") == EXIT)]
    return MessageLog(place=record.place, task=_task(record), messages=parse_messages(values, record.place))


MINI_SWE_AGENT = ReaderFormat(
    name="mini-swe-agent",
    holds="mini-swe-agent trajectories: messages, info, trajectory_format",
    sniff=_sniff,
    names=lambda record: [_task(record)],
    samples=lambda record: [_log(record)],
    needs_tokenizer=True,
)
