"""Message logs to the contexts that the policy saw: which messages, and which of them are trained.

`final` is the whole conversation, `calls` one context a call of the policy, `calls-lastN` the same with observations
older than the last N shortened before every call, as SWE-agent's scaffold does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harts.data.messages import Message, MessageLog, with_fields

SAMPLES = "final, calls, or calls-lastN with a number N >= 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """How to cut."""

    per_call: bool
    """Whether every call of the policy is a context of its own."""
    last_observations: int | None = None
    """Observations that are not shortened; None shortens none."""

    @classmethod
    def parse(cls, text: str) -> Samples:
        """Of `final`, `calls` or `calls-lastN`.

        Raises:
            ValueError: For anything else.
        """
        found = re.fullmatch(r"final|calls(?:-last([1-9][0-9]{0,8}))?", text)
        if found is None:
            raise ValueError(f"Got samples {text!r}, expected {SAMPLES}.")
        return cls(per_call=text != "final", last_observations=int(found[1]) if found[1] else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What one trajectory is rendered from."""

    messages: tuple[Message, ...]
    """In order."""
    trains_all: bool
    """Whether all messages of the policy are trained, or only the last message, which is one."""


def cut(log: MessageLog, samples: Samples) -> Iterator[Context]:
    """The contexts of a log, in order.

    Sub-agents are conversations of their own. A summary that the log marks begins a new context: the system messages
    and the summary. Per call, thinking of turns before the last user message is dropped, as chat templates do.

    Args:
        log: With at least one message of the policy, or nothing comes.
        samples: How to cut. Where the log holds the inputs of all calls, `calls` gives those.
    """
    if samples.per_call and samples.last_observations is None and log.calls:
        for call in log.calls:
            yield Context(messages=call, trains_all=False)
        return
    for conversation in conversations(log.messages):
        if samples.per_call:
            yield from _calls(conversation, samples.last_observations)
        elif (end := _last_answer(conversation)) > 0:
            # What follows the last answer trains nothing, and was never read by the policy.
            yield Context(messages=tuple(conversation[:end]), trains_all=True)


def conversations(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages by agent, cut where a summary replaces what was before."""
    by_agent: dict[str, list[list[Message]]] = {}
    for message in messages:
        parts = by_agent.setdefault(message.agent, [[]])
        if message.starts_context:
            parts.append([earlier for earlier in parts[-1] if earlier.role == "system"])
        parts[-1].append(message)
    return [part for parts in by_agent.values() for part in parts]


def shorten_observations(messages: Sequence[Message], keep: int) -> list[Message]:
    """All but the last `keep` observations become a line that says how long they were.

    This is `LastNObservations` of SWE-agent (Yang et al. 2024, https://arxiv.org/abs/2405.15793).
    """
    places = [i for i, message in enumerate(messages) if message.is_observation]
    shortened = list(messages)
    for i in places[: max(0, len(places) - keep)]:
        lines = len(messages[i].content.splitlines())
        shortened[i] = with_fields(messages[i], content=f"Old environment output: ({lines} lines omitted)")
    return shortened


def drop_thinking(messages: Sequence[Message]) -> list[Message]:
    """Without the thinking of turns before the last user message."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=0)
    return [
        with_fields(message, reasoning=None) if i < last_user and message.reasoning is not None else message
        for i, message in enumerate(messages)
    ]


def _calls(conversation: list[Message], last_observations: int | None) -> Iterator[Context]:
    has_thinking = any(message.reasoning is not None for message in conversation)
    for i, message in enumerate(conversation):
        if message.role != "assistant":
            continue
        before = conversation[:i]
        if last_observations is not None:
            before = shorten_observations(before, last_observations)
        if has_thinking:
            before = drop_thinking(before)
        yield Context(messages=(*before, message), trains_all=False)


def _last_answer(conversation: list[Message]) -> int:
    """One past the last message of the policy."""
    return max((i + 1 for i, message in enumerate(conversation) if message.role == "assistant"), default=0)
