"""tau2-bench results: one object with `simulations`, each with its messages; the policy stands in `info`."""

from __future__ import annotations

from harts.data.messages import Message, MessageLog, parse_messages
from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, group_field


def _task(record: Record) -> str:
    return group_field(record) or ""


def _policy(record: Record) -> str | None:
    """What the agent was told, which the messages leave out."""
    info = record.shared.get("info")
    environment = info.get("environment_info") if isinstance(info, dict) else None
    policy = environment.get("policy") if isinstance(environment, dict) else None
    return policy if isinstance(policy, str) else None


def _log(record: Record) -> MessageLog:
    messages = parse_messages(record.fields.get("messages"), record.place)
    policy = _policy(record)
    if policy is not None and not any(message.role == "system" for message in messages):
        messages = (Message(role="system", content=policy), *messages)
    return MessageLog(place=record.place, task=_task(record), messages=messages)


TAU2_BENCH = ReaderFormat(
    name="tau2-bench",
    holds="tau2-bench results: simulations with task_id and messages",
    sniff=lambda record: "simulations" in record.shared or {"messages", "termination_reason"} <= set(record.fields),
    names=lambda record: [_task(record)],
    samples=lambda record: [_log(record)],
    needs_tokenizer=True,
)
