"""Every format of docs/formats.md: its example is recognised, and read as the documentation says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harts.data import RolloutGroup, Trajectory
from harts.data.readers import FORMATS, GroupShape, read
from harts.data.readers.files import open_records
from harts.data.readers.formats import find_format
from tests.data.letters import byte_tokenizer

DOCS = Path(__file__).resolve().parents[3] / "docs" / "formats.md"
EXAMPLES = dict(re.findall(r"^## (\S+)$.*?^```json$\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.M | re.S))


def groups_of(path: Path, **options: Any) -> list[RolloutGroup]:
    groups = list(read(path, tokenizer=byte_tokenizer(), **options))
    return [group for group in groups if isinstance(group, RolloutGroup)]


def texts(trajectory: Trajectory) -> tuple[str, str]:
    """All of it, and what is trained."""
    ids = trajectory.token_ids
    return bytes(ids.tolist()).decode(), bytes(ids[trajectory.loss_mask].tolist()).decode()


@pytest.fixture
def example(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        (tmp_path / "example.json").write_text(EXAMPLES[name], encoding="utf-8")
        return tmp_path / "example.json"

    return write


def test_every_format_is_documented():
    assert sorted(EXAMPLES) == sorted(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_examples_are_recognised_and_read(example: Callable[[str], Path], name: str):
    path = example(name)
    assert find_format(open_records(path), None).name == name
    (group,) = read(path, tokenizer=byte_tokenizer())
    assert isinstance(group, GroupShape) == (name == "shapes")
    if isinstance(group, RolloutGroup):
        (named,) = read(path, tokenizer=byte_tokenizer(), format=name)
        assert isinstance(named, RolloutGroup)
        assert all(trajectory.loss_mask.any() for trajectory in group.trajectories)
        for one, other in zip(group.trajectories, named.trajectories, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)


def test_messages_train_what_the_policy_wrote(example: Callable[[str], Path]):
    (group,) = groups_of(example("messages"))
    text, trained = texts(group.trajectories[0])
    assert group.name == "t1"
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    assert '{"type": "function", "function": {"name": "look", "parameters": {}}}\n</tools>' in text
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call><|im_end|>'
    assert trained == call + "Hello<|im_end|>"
    assert "<|im_start|>user\n<tool_response>\nnothing\n</tool_response><|im_end|>\n" in text


def test_tau_bench_trials_are_one_group(example: Callable[[str], Path]):
    (group,) = groups_of(example("tau-bench"))
    assert (group.name, [texts(t)[1] for t in group.trajectories]) == ("0", ["Hello<|im_end|>", "Yes?<|im_end|>"])


def test_tau2_policy_is_the_system_message_and_calls_of_users_are_private(tmp_path: Path):
    document = json.loads(EXAMPLES["tau2-bench"])
    document["simulations"][0]["messages"][3:3] = [
        {"role": "user", "content": None, "tool_calls": [{"name": "secret", "arguments": {}, "requestor": "user"}]},
        {"role": "tool", "content": "secret result", "requestor": "user"},
    ]
    (tmp_path / "results.json").write_text(json.dumps(document, indent=2))
    (group,) = groups_of(tmp_path / "results.json")
    text, _ = texts(group.trajectories[0])
    assert group.name == "7"
    assert text.startswith("<|im_start|>system\nRules<|im_end|>\n<|im_start|>assistant\nHi!")
    assert "secret" not in text
    assert '{"name": "look", "arguments": {"at": 3}}' in text


def test_swe_agent_calls_are_its_queries(tmp_path: Path):
    document = json.loads(EXAMPLES["swe-agent"])
    document["trajectory"][1]["query"][3]["content"] = "shortened by the scaffold"
    (tmp_path / "repo__issue-1.traj").write_text(json.dumps(document, indent=2))
    (final,) = groups_of(tmp_path / "repo__issue-1.traj")
    (calls,) = groups_of(tmp_path / "repo__issue-1.traj", samples="calls")
    assert final.name == calls.name == "repo__issue-1"
    assert [texts(t)[1] for t in calls.trajectories] == ["I look.<|im_end|>", "Done.<|im_end|>"]
    assert "shortened" in texts(calls.trajectories[1])[0]
    assert [texts(t)[1] for t in final.trajectories] == ["I look.<|im_end|>Done.<|im_end|>"]


def test_swe_agent_tool_calls_come_from_the_history(tmp_path: Path):
    document = json.loads(EXAMPLES["swe-agent"])
    document["history"][2]["tool_calls"] = [{"function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
    (tmp_path / "a.traj").write_text(json.dumps(document))
    (calls,) = groups_of(tmp_path / "a.traj", samples="calls")
    assert '{"name": "bash", "arguments": {"command": "ls"}}' in texts(calls.trajectories[0])[1]


def test_swe_agent_keeps_the_task_and_shortens_old_observations(tmp_path: Path):
    document = json.loads(EXAMPLES["swe-agent"])
    more = [
        {"role": "user", "content": "b.py", "message_type": "observation", "agent": "main"},
        document["history"][-1],
    ]
    document["history"] += more
    (tmp_path / "a.traj").write_text(json.dumps(document))
    (group,) = groups_of(tmp_path / "a.traj", samples="calls-last1")
    text, _ = texts(group.trajectories[2])
    assert "Fix it" in text and "Old environment output: (1 lines omitted)" in text and "b.py" in text
    assert "a.py" not in text


def test_mini_swe_agent_leaves_the_exit_out(example: Callable[[str], Path]):
    (group,) = groups_of(example("mini-swe-agent"))
    assert group.name == "i1"
    assert texts(group.trajectories[0])[0].endswith("<|im_start|>assistant\nDone.<|im_end|>")


def test_trl_rollouts_share_their_prompt(example: Callable[[str], Path]):
    (group,) = groups_of(example("trl"))
    first, second = group.trajectories
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [False] * 3 + [True, True, False]
    assert first.sampling_logprobs is not None
    assert first.sampling_logprobs.tolist() == [0, 0, 0, -0.1, -0.2, 0]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 7]


def test_trl_padded_batches(tmp_path: Path):
    row = {
        "prompt_ids": [9, 1, 2],
        "prompt_mask": [0, 1, 1],
        "completion_ids": [3, 4, 9],
        "completion_mask": [1, 1, 0],
        "tool_mask": [1, 0, 1],
        "advantages": 2.0,
        "ref_per_token_logps": [-1, -2, -3],
        "sampling_per_token_logps": [[-4.0, -9.0], [-5.0, -9.0], [-6.0, -9.0]],
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    (group,) = groups_of(tmp_path / "t.jsonl")
    (only,) = group.trajectories
    assert only.token_ids.tolist() == [1, 2, 3, 4]
    assert only.loss_mask.tolist() == [False, False, True, False]
    assert only.advantages.tolist() == [2.0] * 4
    assert only.ref_logprobs is not None and only.ref_logprobs.tolist() == [0, 0, -1, -2]
    assert only.sampling_logprobs is not None and only.sampling_logprobs.tolist() == [0, 0, -4, -5]


def test_verl_padding_is_taken_off(example: Callable[[str], Path]):
    (group,) = groups_of(example("verl"))
    (only,) = group.trajectories
    assert group.name == "u1"
    assert only.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert only.loss_mask.tolist() == [False, False, True, False, True]
    assert only.advantages.tolist() == [0, 0, 0.5, 0, 0.5]
    assert only.sampling_logprobs is not None and only.sampling_logprobs.tolist() == [0, 0, -0.1, 0, -0.2]


def test_verl_holes_in_the_mask_are_refused(tmp_path: Path):
    row = json.loads(EXAMPLES["verl"]) | {"attention_mask": [0, 1, 0, 1, 1, 1, 1, 0]}
    (tmp_path / "v.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"v\.jsonl, line 1, field attention_mask: expected zeros, the prompt"):
        groups_of(tmp_path / "v.jsonl")


def test_prime_rl_samples_and_micro_batches(tmp_path: Path, example: Callable[[str], Path]):
    (group,) = groups_of(example("prime-rl"))
    (only,) = group.trajectories
    assert only.loss_mask.tolist() == [False, False, True, False, True]
    assert only.advantages.tolist() == [0.5] * 5
    packed = {
        "input_ids": [1, 2, 3, 1, 4],
        "loss_mask": [False, True, True, True, True],
        "advantages": [0, 1, 1, 0, 2],
        "inference_logprobs": [0, -1, -2, 0, -3],
        "position_ids": [0, 1, 2, 0, 1],
        "temperature": 0.7,
    }
    (tmp_path / "packed.jsonl").write_text(json.dumps(packed) + "\n")
    ((one, other),) = (group.trajectories for group in groups_of(tmp_path / "packed.jsonl"))
    assert (one.token_ids.tolist(), other.token_ids.tolist()) == ([1, 2, 3], [1, 4])
    # Nothing predicts a first token.
    assert other.loss_mask.tolist() == [False, True]
    assert other.temperature == 0.7


def test_tinker_streams_move_to_the_token_they_speak_of(example: Callable[[str], Path]):
    (group,) = groups_of(example("tinker"))
    (only,) = group.trajectories
    assert only.token_ids.tolist() == [1, 2, 3, 4]
    assert only.loss_mask.tolist() == [False, False, True, True]
    assert only.advantages.tolist() == [0, 0, 0.5, 0.5]
    assert only.sampling_logprobs is not None and only.sampling_logprobs.tolist() == [0, 0, -0.1, -0.2]


def test_labels_are_a_mask(example: Callable[[str], Path]):
    (group,) = groups_of(example("tokens"))
    assert group.trajectories[0].token_ids.tolist() == [1, 2, 3, 4]
    assert group.trajectories[0].loss_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("messages", {"messages": []}, "field messages: expected a list of at least one message"),
        ("messages", {"messages": [{"role": "boss"}]}, "field messages: message 0, role: got 'boss'"),
        ("messages", {"messages": [{"role": "user", "content": 3}]}, "message 0, content: got a int"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ("messages", {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ("messages", {"messages": [{"role": "user", "content": "?"}]}, "no message of the assistant"),
        ("messages", {"tools": [3]}, "field tools: expected a list of objects"),
        ("messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "message 0, tool_calls"),
        ("trl", {"completion_ids": [[1]]}, "field completion_ids: expected 2 lists"),
        ("trl", {"logprobs": [[0.1], [0, 0]]}, "rollout 1, field logprobs: expected a list of 3 numbers"),
        ("trl", {"prompt_ids": [[1, -2], [1]]}, "rollout 1: token 1 has the id -2"),
        ("verl", {"responses": [3, 4, 5.5, 0]}, "field responses: entry 2 is 5.5, expected an integer"),
        ("prime-rl", {"completion_mask": [1, 2, 0]}, "field completion_mask: entry 1 is 2, expected 0 or 1"),
        ("prime-rl", {"completion_temperatures": [1, 2, 1], "temperature": None}, "more than one in a sample"),
        ("tinker", {"model_input": {"chunks": [{"type": "image"}]}}, "a chunk without tokens"),
        ("tinker", {"model_input": [1, 2, 9]}, "field target_tokens: expected the 3 tokens of model_input"),
        ("tokens", {"labels": [1]}, "field labels: expected 5 entries"),
    ],
)
def test_messages_name_file_line_and_field(tmp_path: Path, name: str, change: dict[str, object], message: str):
    path = tmp_path / "f.jsonl"
    good = json.loads(EXAMPLES[name])
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(ValueError, match=r"f\.jsonl, line 2.*" + re.escape(message)):
        groups_of(path)
