"""SWE-agent `.traj` files: `history` is the conversation, `trajectory` the steps, each with its exact `query`."""

from __future__ import annotations

from typing import Any

from harts.data.messages import Message, MessageLog, parse_messages, parse_tools, with_fields
from harts.data.readers.format import ReaderFormat
from harts.data.readers.record import Record


def _task(record: Record) -> str:
    named = record.fields.get("instance_id")
    return named if isinstance(named, str) else record.file_name


def _log(record: Record) -> MessageLog:
    values, place = record.fields.get("history"), record.place
    messages = parse_messages(values, place, name="history")
    if isinstance(values, list) and len(values) == len(messages):
        messages = tuple(map(_mark, messages, values, _observed(values)))
        main = next((value.get("agent") for value in values if value.get("role") == "assistant"), "")
        messages = tuple(with_fields(message, agent="") if message.agent == main else message for message in messages)
    return MessageLog(
        place=place,
        task=_task(record),
        messages=messages,
        tools=parse_tools(record.fields.get("tools"), place),
        calls=_calls(record, messages),
    )


def _observed(values: list[dict[str, Any]]) -> list[bool]:
    """What the scaffold may shorten; its first observation is the task itself."""
    observed = [value.get("message_type") == "observation" and not value.get("is_demo") for value in values]
    if True in observed:
        observed[observed.index(True)] = False
    return observed


def _mark(message: Message, value: dict[str, Any], observed: bool) -> Message:
    # A demonstration is shown to the policy as one message of a user in newer versions, as a dialogue in older ones.
    marked = value.get("message_type") is not None
    is_observation = observed if marked else message.is_observation
    return with_fields(message, is_observation=is_observation)


def _calls(record: Record, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], ...]:
    steps = record.fields.get("trajectory")
    steps = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if not steps or not all(isinstance(step.get("query"), list) and step["query"] for step in steps):
        return ()
    answers = [message for message in messages if message.role == "assistant" and message.agent == ""]
    calls = []
    for i, step in enumerate(steps):
        query = parse_messages(step["query"], record.place, name=f"trajectory, step {i}, query")
        response = step.get("response")
        if not isinstance(response, str):
            raise ValueError(f"{record.place}, field trajectory, step {i}, response: expected text.")
        # Tool calls stand in the history alone; demonstrations come first there.
        answer = answers[len(answers) - len(steps) + i] if len(answers) >= len(steps) else None
        calls.append((*query, answer or Message(role="assistant", content=response)))
    return tuple(calls)


SWE_AGENT = ReaderFormat(
    name="swe-agent",
    holds="SWE-agent .traj files: history, trajectory",
    sniff=lambda record: isinstance(record.fields.get("history"), list) and "trajectory" in record.fields,
    names=lambda record: [_task(record)],
    samples=lambda record: [_log(record)],
    needs_tokenizer=True,
)
