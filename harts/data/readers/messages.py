"""OpenAI-style message logs: `messages`, `conversations`, or `prompt` and `completion` as messages; and `tools`."""

from __future__ import annotations

import json
from typing import Any

from harts.data.messages import MessageLog, parse_messages, parse_tools
from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record, digest, group_field

FIELDS = ("messages", "conversations")


def message_values(record: Record) -> tuple[str, Any]:
    """Name and value of the field with the messages."""
    for name in FIELDS:
        if record.fields.get(name) is not None:
            return name, record.fields[name]
    prompt, completion = record.fields.get("prompt"), record.fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return "prompt", prompt + completion
    raise ValueError(f"{record.place}, field messages: missing. Expected a list of messages with role and content.")


def message_log(record: Record) -> MessageLog:
    """The log of one record.

    Raises:
        ValueError: Naming place, field and message.
    """
    name, values = message_values(record)
    return MessageLog(
        place=record.place,
        task=message_task(record),
        messages=parse_messages(values, record.place, name=name),
        tools=parse_tools(record.fields.get("tools"), record.place),
    )


def message_task(record: Record) -> str:
    """The task that the record names, or else what is said before the first answer."""
    named = group_field(record)
    if named is not None:
        return named
    _, values = message_values(record)
    begin = []
    for value in values if isinstance(values, list) else []:
        if isinstance(value, dict) and value.get("role", value.get("from")) in ("assistant", "gpt", "ai"):
            break
        begin.append(value)
    return digest(json.dumps(begin, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))


def _sniff(record: Record) -> bool:
    has = any(isinstance(record.fields.get(name), list) for name in FIELDS)
    pair = (record.fields.get("prompt"), record.fields.get("completion"))
    return has or all(isinstance(part, list) and part and isinstance(part[0], dict) for part in pair)


MESSAGES = ReaderFormat(
    name="messages",
    holds="OpenAI-style message logs: messages, tools",
    sniff=_sniff,
    names=lambda record: [message_task(record)],
    samples=lambda record: [message_log(record)],
    needs_tokenizer=True,
)
