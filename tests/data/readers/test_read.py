"""`read`: groups that do not stand together, every container, damaged records, progress, folders."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import harts
from harts.data import RolloutGroup
from harts.data.readers import SkippedLines, read
from tests.data.letters import byte_tokenizer

# Trials of three tasks, one round after another: no task stands together.
ROWS = [{"task_id": task, "input_ids": [task, trial, 7]} for trial in range(3) for task in (4, 2, 9)]
EXPECTED = {str(task): [[task, trial, 7] for trial in range(3)] for task in (4, 2, 9)}


def ids_of(path: Path, **options: Any) -> dict[str, list[list[int]]]:
    groups = [group for group in read(path, **options) if isinstance(group, RolloutGroup)]
    numbers = [{trajectory.group_id for trajectory in group.trajectories} for group in groups]
    assert numbers == [{number} for number in range(len(groups))]
    return {group.name: [t.token_ids.tolist() for t in group.trajectories] for group in groups}


def write_lines(path: Path, rows: list[Any]) -> Path:
    data = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        data = zstandard.ZstdCompressor().compress(data)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# Compression is found by content, so a wrong ending does not matter.
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.jsonl.zst"])
@pytest.mark.parametrize("order", ["rounds", "tasks"])
def test_tasks_come_in_order_of_their_first_record(tmp_path: Path, name: str, order: str):
    rows = ROWS if order == "rounds" else sorted(ROWS, key=lambda row: [4, 2, 9].index(row["task_id"]))
    path = write_lines(tmp_path / name, rows).rename(tmp_path / "no_ending")
    assert list(ids_of(path).items()) == list(EXPECTED.items())


def test_it_is_public(tmp_path: Path):
    (group, *_) = harts.read(write_lines(tmp_path / "r.jsonl", ROWS))
    assert isinstance(group, harts.RolloutGroup)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_columns(tmp_path: Path, kind: str):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    rows = [row | {"loss_mask": [0, 0, 1], "messages": None} for row in ROWS]
    table = pa.Table.from_pylist(rows)
    path = tmp_path / "data-00000-of-00001.arrow"
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=2)
    else:
        with (
            pa.OSFile(str(path), "wb") as sink,
            getattr(pa.ipc, f"new_{'file' if kind == 'arrow' else kind}")(sink, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=2)
    assert ids_of(path) == EXPECTED
    (tmp_path / "cache-1.arrow").write_bytes(b"not data")
    (tmp_path / "state.json").write_text("{}")
    assert ids_of(tmp_path) == EXPECTED
    path.write_bytes(path.read_bytes()[:-20] if kind != "stream" else path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"\.arrow: damaged or not supported"):
        ids_of(path)


def test_messages_in_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
    ]
    pa.parquet.write_table(pa.Table.from_pylist([{"messages": messages, "uid": "u"}]), tmp_path / "m.parquet")
    (group,) = read(tmp_path / "m.parquet", tokenizer=byte_tokenizer())
    assert isinstance(group, RolloutGroup)
    assert b'"look"' in bytes(group.trajectories[0].token_ids.tolist())


@pytest.mark.parametrize("kind", ["safetensors", "torch", "torch in a dictionary"])
def test_tensors(tmp_path: Path, kind: str):
    batch = {
        "prompts": torch.tensor([[0, 1, 2], [0, 0, 3], [0, 1, 2]]),
        "responses": torch.tensor([[4, 5], [6, 0], [7, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 0], [0, 1, 1, 1, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, -1], [-2, 0], [-3, 0]], dtype=torch.bfloat16),
    }
    path = tmp_path / "batch.bin"
    if kind == "safetensors":
        save_file(batch, str(path))
    else:
        torch.save(batch if kind == "torch" else {"batch": batch, "meta_info": {}}, path)
    (one, other) = read(path)
    assert isinstance(one, RolloutGroup) and isinstance(other, RolloutGroup)
    assert [t.token_ids.tolist() for t in one.trajectories] == [[1, 2, 4, 5], [1, 2, 7]]
    assert [t.token_ids.tolist() for t in other.trajectories] == [[3, 6]]
    assert one.trajectories[0].sampling_logprobs is not None
    assert one.trajectories[0].sampling_logprobs.tolist() == [0, 0, -0.5, -1]


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_pickles_are_refused_without_running_them(tmp_path: Path, kind: str):
    path, mark = tmp_path / "p.bin", tmp_path / "ran"
    with path.open("wb") as file:
        (pickle.dump if kind == "pickle" else torch.save)({"batch": Trap(str(mark))}, file)
    with pytest.raises(ValueError, match=r"p\.bin.*(is a pickle|plain dictionary of tensors)"):
        list(read(path))
    assert not mark.exists()


@pytest.mark.parametrize("order", ["rounds", "tasks"])
def test_damaged_records_are_counted(tmp_path: Path, order: str):
    rows: list[Any] = list(ROWS) if order == "rounds" else sorted(ROWS, key=lambda row: row["task_id"])
    rows[3:3] = ["{", {"task_id": 5, "input_ids": ["x"]}, {"task_id": 4, "input_ids": []}]
    rows.insert(0, "nonsense")
    path = write_lines(tmp_path / "r.jsonl", rows)
    with pytest.raises(ValueError, match=r"r\.jsonl, line 1: no JSON"):
        ids_of(path)
    skipped = SkippedLines()
    groups = list(read(path, skip_bad=skipped))
    found = {g.name: [t.token_ids.tolist() for t in g.trajectories] for g in groups if isinstance(g, RolloutGroup)}
    assert found == EXPECTED
    assert skipped.count == 4
    assert sorted(message.split(":")[0].split("line ")[1] for message in skipped.messages) == [
        "1",
        "5",
        "6, field input_ids",
        "7",
    ]


def test_logs_that_cannot_be_rendered_are_counted(tmp_path: Path):
    good = {"uid": "a", "messages": [{"role": "assistant", "content": "x"}]}
    path = write_lines(tmp_path / "m.jsonl", [good, {"uid": "a", "messages": [{"role": "user", "content": "x"}]}])
    skipped = SkippedLines()
    (group,) = read(path, tokenizer=byte_tokenizer(), skip_bad=skipped)
    assert isinstance(group, RolloutGroup) and len(group.trajectories) == 1
    assert "line 2: no message of the assistant" in skipped.messages[0]


def test_messages_need_a_tokenizer_even_if_damage_is_skipped(tmp_path: Path):
    path = write_lines(tmp_path / "m.jsonl", [{"messages": [{"role": "assistant", "content": "x"}]}])
    with pytest.raises(ValueError, match=r"m\.jsonl: holds messages \(messages\), not token ids\. Name a tokenizer"):
        list(read(path, skip_bad=SkippedLines()))


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]])
def test_progress_grows_to_the_size_of_the_file(tmp_path: Path, name: str, rows: list[Any]):
    path, seen = write_lines(tmp_path / name, rows), []
    list(read(path, progress=seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


def test_a_folder_of_files(tmp_path: Path):
    for task in (2, 1):
        folder = tmp_path / f"task-{task}"
        folder.mkdir()
        history = [{"role": "user", "content": str(task)}, {"role": "assistant", "content": "ok"}]
        for run in (0, 1):
            document = {"history": history, "trajectory": [], "instance_id": f"task-{run}"}
            (folder / f"{task}-{run}.traj").write_text(json.dumps(document, indent=2))
    (tmp_path / "preds.json").write_text("{}")
    groups = [group for group in read(tmp_path, tokenizer=byte_tokenizer()) if isinstance(group, RolloutGroup)]
    assert [(group.name, len(group.trajectories)) for group in groups] == [("task-0", 2), ("task-1", 2)]


def test_our_own_group_ids_are_kept(tmp_path: Path):
    rows = [{"token_ids": [1, i], "group_id": group} for i, group in enumerate([7, -3, 7])]
    groups = list(read(write_lines(tmp_path / "t.jsonl", [*rows, {"token_ids": [9]}])))
    assert [(g.name, [t.group_id for t in g.trajectories]) for g in groups if isinstance(g, RolloutGroup)] == [
        ("7", [7, 7]),
        ("-3", [-3]),
        ("0", [0]),
    ]


def test_group_ids_are_found_however_they_are_written(tmp_path: Path):
    lines = [
        '{"token_ids": [1], "group_id": 1}',
        '{"token_ids": [2], "group_id": 2, "group_id": 5}',
        '{"group_id" : 1,"token_ids": [3]}',
        '{"token_ids": [4], "group\\u005fid": 5}',
        '{"token_ids": [5], "group_id": -0}',
    ]
    groups = [group for group in read(write_lines(tmp_path / "t.jsonl", lines)) if isinstance(group, RolloutGroup)]
    found = {group.name: [int(t.token_ids[0]) for t in group.trajectories] for group in groups}
    assert found == {"1": [1, 3], "5": [2, 4], "0": [5]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty, expected rollouts"),
        ('{"x": 1}\n', "line 1: fields x, which is no format that is known"),
        ("hello\n", "line 1: no JSON"),
    ],
)
def test_what_is_no_rollout_file_is_refused(tmp_path: Path, content: str, message: str):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"x\.jsonl.*" + message):
        list(read(tmp_path / "x.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "csv"}, "Got the format 'csv', expected one of trajectories"),
        ({"samples": "calls-last0"}, "Got samples 'calls-last0', expected final, calls"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, str], message: str):
    path = write_lines(tmp_path / "r.jsonl", ROWS)
    with pytest.raises(ValueError, match=message):
        list(read(path, **options))
    with pytest.raises(ValueError, match="is no file"):
        list(read(tmp_path / "missing"))


def test_reading_is_lazy(tmp_path: Path):
    path = write_lines(
        tmp_path / "r.jsonl", [*sorted(ROWS, key=lambda row: row["task_id"]), {"uid": 1, "input_ids": [-1]}]
    )
    groups = read(path)
    first = next(groups)
    assert isinstance(first, RolloutGroup)
    assert np.array_equal(first.trajectories[0].token_ids, [2, 0, 7])
    with pytest.raises(ValueError, match="line 10"):
        list(groups)
