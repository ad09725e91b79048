"""Conversations as agents log them, before there are tokens.

One plain form for all message logs: OpenAI's chat messages, with what tools write around them taken off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = ("text", "input_text", "output_text")
THINK_BEGIN, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that the policy wrote."""

    name: str
    """Of the tool."""
    arguments: Mapping[str, Any] | str
    """Parsed; the text itself if it is no JSON object."""
    written: str
    """The arguments as the policy wrote them, or as Python writes them where the log holds an object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message."""

    role: Role
    """`assistant` is the policy."""
    content: str = ""
    """Text."""
    reasoning: str | None = None
    """The thinking before the content; None if there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """After the content."""
    is_observation: bool = False
    """Whether a scaffold that shortens old observations may shorten this one."""
    agent: str = ""
    """Which of several agents saw it; empty for the main one."""
    starts_context: bool = False
    """A summary that stands for everything before it but the system messages."""

    def to_dict(self) -> dict[str, Any]:
        """As chat templates expect it."""
        values: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            values["reasoning_content"] = self.reasoning
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            values["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageLog:
    """What happened in one attempt at a task."""

    place: str
    """Where it stands, for messages."""
    task: str
    """What all attempts at the task have in common."""
    messages: tuple[Message, ...]
    """In order; those of several agents may alternate."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """OpenAI tool schemas; None if the log does not say."""
    calls: tuple[tuple[Message, ...], ...] = ()
    """Where the log holds the exact input of every call of the policy: input and answer of each."""


def parse_messages(values: Any, place: str, *, name: str = "messages") -> tuple[Message, ...]:
    """OpenAI chat messages, with the variants in use.

    Args:
        values: A list of objects with `role`, `content` (text, a list of text parts, or null), `tool_calls` (OpenAI's
            nested form or name and arguments directly), `function_call`, `reasoning_content` (or `reasoning`,
            `thinking`, or a leading `<think>` block of the content), `agent`, `isSidechain`, `compaction`,
            `isCompactSummary`.
        place: For messages.
        name: Of the field.

    Raises:
        ValueError: Naming place, field and message.
    """
    if not isinstance(values, list) or not values:
        raise ValueError(f"{place}, field {name}: expected a list of at least one message.")
    messages = [
        _message(value, f"{place}, field {name}: message {i}")
        for i, value in enumerate(values)
        if not _is_private(value)
    ]
    return mark_observations(messages)


def parse_tools(value: Any, place: str) -> tuple[Mapping[str, Any], ...] | None:
    """A list of OpenAI tool schemas, as it is or as JSON text.

    Raises:
        ValueError: Naming the place.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}, field tools: no JSON ({error}).") from error
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"{place}, field tools: expected a list of objects, one a tool.")
    _text(json.dumps(value, ensure_ascii=False), f"{place}, field tools")
    return tuple(value) or None


def mark_observations(messages: list[Message]) -> tuple[Message, ...]:
    """Mark what the environment answered: messages of tools, or without any, what users say to the policy's actions."""
    has_tools = any(message.role == "tool" for message in messages)
    marked, acted = [], False
    for message in messages:
        acted = acted or message.role == "assistant"
        observed = message.role == "tool" if has_tools else acted and message.role == "user"
        marked.append(with_fields(message, is_observation=observed) if observed else message)
    return tuple(marked)


def with_fields(message: Message, **changes: Any) -> Message:
    """A copy with some fields changed; quicker than `dataclasses.replace`."""
    values = {name: getattr(message, name) for name in Message.__slots__}
    return Message(**{**values, **changes})


def _is_private(value: Any) -> bool:
    """Calls that a simulated user made, and their answers (tau2-bench): the policy never saw them."""
    if not isinstance(value, dict):
        return False
    if value.get("role") == "tool":
        return value.get("requestor") == "user"
    return value.get("role") == "user" and bool(value.get("tool_calls")) and not value.get("content")


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is a {type(value).__name__}, expected an object with role and content.")
    role = ROLES.get(str(value.get("role", value.get("from"))))
    if role is None:
        raise ValueError(f"{place}, role: got {value.get('role')!r}, expected one of {', '.join(ROLES)}.")
    content, reasoning = _content(value.get("content", value.get("value")), place)
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(value.get(key), str) and value[key]:
            reasoning = value[key]
    if role == "assistant" and reasoning is None and content.lstrip().startswith(THINK_BEGIN) and THINK_END in content:
        inside, _, content = content.partition(THINK_END)
        reasoning, content = inside.lstrip().removeprefix(THINK_BEGIN).strip("\n"), content.lstrip("\n")
    agent = value.get("agent", "")
    return Message(
        role=role,
        content=_text(content, place),
        reasoning=None if reasoning is None else _text(reasoning, place),
        tool_calls=_tool_calls(value, place) if role == "assistant" else (),
        agent="sidechain" if value.get("isSidechain") is True else agent if isinstance(agent, str) else "",
        starts_context=value.get("compaction") is True or value.get("isCompactSummary") is True,
    )


def _content(value: Any, place: str) -> tuple[str, str | None]:
    if value is None:
        return "", None
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list):
        raise ValueError(f"{place}, content: got a {type(value).__name__}, expected text or a list of parts.")
    texts, thoughts = [], []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if isinstance(part, str):
            texts.append(part)
        elif kind in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            thoughts.append(part["thinking"])
        else:
            raise ValueError(
                f"{place}, content: a part of type {kind!r}, expected text. Other media are not supported."
            )
    return "".join(texts), "".join(thoughts) or None


def _tool_calls(value: Mapping[str, Any], place: str) -> tuple[ToolCall, ...]:
    calls = value.get("tool_calls") or ([value["function_call"]] if value.get("function_call") else [])
    if not isinstance(calls, list):
        raise ValueError(f"{place}, tool_calls: got a {type(calls).__name__}, expected a list.")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{place}, tool_calls: expected objects with a function that has name and arguments.")
        given = function.get("arguments")
        arguments = _arguments(given, place)
        written = given if isinstance(given, str) else json.dumps(arguments, ensure_ascii=False)
        found.append(ToolCall(name=_text(function["name"], place), arguments=arguments, written=written))
    return tuple(found)


def _arguments(value: Any, place: str) -> Mapping[str, Any] | str:
    if value is None:
        return {}
    if isinstance(value, str):
        _text(value, place)
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if not isinstance(parsed, dict):
            return value
        value = parsed
    if isinstance(value, dict):
        _text(json.dumps(value, ensure_ascii=False), f"{place}, tool_calls")
        return cast("Mapping[str, Any]", value)
    raise ValueError(
        f"{place}, tool_calls: arguments are a {type(value).__name__}, expected an object or its JSON text."
    )


def _text(value: str, place: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: half of a surrogate pair at character {error.start}, which is no text.") from error
    return value
