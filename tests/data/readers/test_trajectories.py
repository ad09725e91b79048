"""Trajectory files: a round trip, and what a message names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harts.data import Trajectory
from harts.data.readers import read_trajectories, write_trajectories
from harts.data.readers.trajectories import FIELDS
from tests.cases import RICH, trajectories_of


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_round_trip_is_exact(tmp_path: Path, name: str):
    written = [*trajectories_of(RICH), Trajectory.of([1, 2], share_key=[0, 7], routes=[[[0, 2]], [[-1, -1]]])]
    write_trajectories(tmp_path / name, written)
    read = list(read_trajectories(tmp_path / name))
    assert len(read) == len(written)
    for before, after in zip(written, read, strict=True):
        for field in FIELDS:
            one, other = getattr(before, field), getattr(after, field)
            assert type(one) is type(other)
            assert np.array_equal(one, other), field


def test_only_token_ids_are_required(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"token_ids": [5, 6, 7]}\n{"token_ids": [5], "advantages": 0.5}\n')
    first, second = read_trajectories(tmp_path / "t.jsonl")
    assert first.loss_mask.tolist() == [False, True, True]
    assert second.advantages.tolist() == [0.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": []}, "field token_ids: expected a list of at least one integer"),
        ({"token_ids": [1, 2.5, 3]}, "field token_ids: entry 1 is 2.5, expected an integer"),
        ({"token_ids": [1, 2, 2**63]}, "field token_ids: entry 2"),
        ({"loss_mask": [0, 1]}, "field loss_mask: expected a list of 3 numbers"),
        ({"loss_mask": [0, 1, 2]}, "field loss_mask: entry 2 is 2, expected 0 or 1"),
        ({"advantages": "0.5"}, "field advantages: expected a list of 3"),
        ({"ref_logprobs": [0, None, 0]}, "field ref_logprobs: entry 1 is None, expected a number"),
        ({"share_key": [0, 0, 0.5]}, "field share_key: entry 2"),
        ({"routes": [[[0, 1]], [[0, 1]]]}, "field routes: expected 3 lists of as many lists of integers"),
        ({"routes": [[[0]], [[0]], [[0, 1]]]}, "field routes: expected 3 lists"),
        ({"group_id": "a"}, "field group_id: got 'a', expected an integer"),
        ({"weight": None}, "field weight: got None"),
        ({"token_idz": [1]}, "field token_idz: unknown. Fields are token_ids, loss_mask"),
    ],
)
def test_messages_name_file_line_and_field(tmp_path: Path, change: dict[str, object], message: str):
    good = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2, " + message):
        list(read_trajectories(path))
