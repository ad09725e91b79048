"""Conversations to contexts: calls, shortened observations, dropped thinking, sub-agents, summaries."""

from __future__ import annotations

from typing import Any

import pytest

from harts.data.cutting import Context, Samples, cut
from harts.data.messages import MessageLog, parse_messages

SYSTEM, TASK = {"role": "system", "content": "S"}, {"role": "user", "content": "T"}


def contexts(samples: str, *messages: dict[str, Any]) -> list[Context]:
    log = MessageLog(place="log", task="t", messages=parse_messages(list(messages), "log"))
    return list(cut(log, Samples.parse(samples)))


def words(context: Context) -> str:
    """One word a message: its thinking in brackets, then its content."""
    return " ".join((f"[{m.reasoning}]" if m.reasoning else "") + m.content for m in context.messages)


def steps(count: int, role: str = "tool") -> list[dict[str, Any]]:
    pairs = [
        ({"role": "assistant", "content": f"a{i}"}, {"role": role, "content": f"o{i}\no{i}"}) for i in range(count)
    ]
    return [message for pair in pairs for message in pair]


def test_final_ends_with_the_last_answer():
    (only,) = contexts("final", SYSTEM, TASK, *steps(2), {"role": "user", "content": "bye"})
    assert (words(only), only.trains_all) == ("S T a0 o0\no0 a1", True)


def test_calls_hold_all_before_them():
    found = contexts("calls", SYSTEM, TASK, *steps(2))
    assert [words(context) for context in found] == ["S T a0", "S T a0 o0\no0 a1"]
    assert not any(context.trains_all for context in found)


# Users answer where there are no tools; the task comes before the first answer and stays.
@pytest.mark.parametrize("role", ["tool", "user"])
def test_all_but_the_last_observations_are_shortened(role: str):
    found = contexts("calls-last2", SYSTEM, TASK, *steps(4, role), {"role": "assistant", "content": "end"})
    old = "Old environment output: (2 lines omitted)"
    assert words(found[2]) == "S T a0 o0\no0 a1 o1\no1 a2"
    assert words(found[3]) == f"S T a0 {old} a1 o1\no1 a2 o2\no2 a3"
    assert words(found[4]) == f"S T a0 {old} a1 {old} a2 o2\no2 a3 o3\no3 end"


def test_what_users_say_beside_tools_is_no_observation():
    chat = {"role": "user", "content": "u"}
    found = contexts("calls-last1", TASK, *steps(1), chat, *steps(1), {"role": "assistant", "content": "end"})
    assert words(found[-1]) == "T a0 Old environment output: (2 lines omitted) u a0 o0\no0 end"


def test_thinking_before_the_last_user_message_is_dropped_per_call():
    think = [
        TASK,
        {"role": "assistant", "content": "<think>\nr0\n</think>\n\na0"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
        {"role": "tool", "content": "o"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "r2"}, {"type": "text", "text": "a2"}]},
    ]
    assert [words(c) for c in contexts("calls", *think)] == ["T [r0]a0", "T a0 u [r1]a1", "T a0 u [r1]a1 o [r2]a2"]
    assert [words(c) for c in contexts("final", *think)] == ["T [r0]a0 u [r1]a1 o [r2]a2"]


def test_sub_agents_are_conversations_of_their_own():
    log = [
        TASK,
        {"role": "assistant", "content": "ask"},
        {"role": "user", "content": "sub", "agent": "helper"},
        {"role": "assistant", "content": "help", "agent": "helper"},
        {"role": "tool", "content": "helped"},
        {"role": "user", "content": "side", "isSidechain": True},
        {"role": "assistant", "content": "chain", "isSidechain": True},
        {"role": "assistant", "content": "done"},
    ]
    assert [words(c) for c in contexts("final", *log)] == ["T ask helped done", "sub help", "side chain"]
    assert [words(c) for c in contexts("calls", *log)] == ["T ask", "T ask helped done", "sub help", "side chain"]


@pytest.mark.parametrize("mark", ["compaction", "isCompactSummary"])
def test_a_summary_begins_a_context(mark: str):
    log = [
        SYSTEM,
        TASK,
        *steps(1),
        {"role": "user", "content": "summary", mark: True},
        {"role": "assistant", "content": "b"},
    ]
    assert [words(c) for c in contexts("final", *log)] == ["S T a0", "S summary b"]
    assert [words(c) for c in contexts("calls", *log)] == ["S T a0", "S summary b"]


def test_nothing_of_the_policy_gives_nothing():
    assert contexts("final", SYSTEM, TASK) == contexts("calls", SYSTEM, TASK) == []


@pytest.mark.parametrize(
    "text", ["", "all", "calls-last", "calls-last0", "calls-last-1", "final-last5", "calls-last5 "]
)
def test_other_ways_to_cut_are_refused(text: str):
    with pytest.raises(ValueError, match="expected final, calls, or calls-lastN"):
        Samples.parse(text)
