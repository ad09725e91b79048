"""Qwen's ChatML: turns between `<|im_start|>` and `<|im_end|>`, tools in the system turn, their answers as user turns.

For tokenizers that come without a chat template. Both marks are special tokens, and a tokenizer splits text there
before anything else, so turns may be tokenised one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harts.data.messages import Message, ToolCall

BEGIN, END = "<|im_start|>", "<|im_end|>"
TOOLS_HEAD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
TOOLS_TAIL = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn; its text is `head + body + END`, and a line break follows if another turn does."""

    head: str
    """What a prompt for this turn would end with."""
    body: str
    """What was written."""
    is_policy: bool
    """Whether the policy wrote the body."""


def turns(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Iterator[Turn]:
    """The turns of a conversation, in Qwen's rendering.

    Args:
        messages: A first system message takes the tools; several answers of tools in a row are one turn.
        tools: OpenAI schemas, or None.

    Example:
        >>> [turn.head + turn.body + END for turn in turns([Message(role="user", content="Hi")], None)]
        ['<|im_start|>user\\nHi<|im_end|>']
    """
    begin = 1 if messages and messages[0].role == "system" else 0
    system = messages[0].content if begin else ""
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        system = (system + "\n\n" if begin else "") + TOOLS_HEAD + listed + TOOLS_TAIL
    if begin or tools:
        yield Turn(head=f"{BEGIN}system\n", body=system, is_policy=False)
    answers: list[str] = []
    for message in messages[begin:]:
        if message.role == "tool":
            answers.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if answers:
            yield Turn(head=f"{BEGIN}user\n", body="\n".join(answers), is_policy=False)
            answers = []
        is_policy = message.role == "assistant"
        yield Turn(
            head=f"{BEGIN}{message.role}\n",
            body=_answer(message) if is_policy else message.content,
            is_policy=is_policy,
        )
    if answers:
        yield Turn(head=f"{BEGIN}user\n", body="\n".join(answers), is_policy=False)


def _answer(message: Message) -> str:
    thinking = "" if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n"
    return thinking + "\n".join(part for part in (message.content, *map(_call, message.tool_calls)) if part)


def _call(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.written}}}\n</tool_call>'
