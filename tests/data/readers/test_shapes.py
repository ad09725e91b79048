"""Shapes files: what is read, and what a message names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from harts.data.readers import read_shapes

WORKED = {
    "task": "worked",
    "length": [3, 5, 4, 4],
    "lcp": [0, 3, 3, 2],
    "loss_spans": [[[1, 3]], [[3, 5]], [], [[2, 4]]],
}


def write(path: Path, *lines: object) -> Path:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["shapes.jsonl", "shapes.jsonl.gz"])
def test_groups_come_one_by_one(tmp_path: Path, name: str):
    path = write(tmp_path / name, WORKED, "\n", {"length": [2, 1], "lcp": [0, 0]})
    first, second = read_shapes(path)
    assert (first.name, first.length_N.tolist(), first.lcp_N.tolist()) == ("worked", [3, 5, 4, 4], [0, 3, 3, 2])
    assert first.loss_spans == (((1, 3),), ((3, 5),), (), ((2, 4),))
    assert (second.name, second.loss_spans) == ("", (((1, 2),), ()))


def test_good_lines_are_read_before_a_bad_one(tmp_path: Path):
    groups = read_shapes(write(tmp_path / "s.jsonl", WORKED, "{"))
    assert next(groups).name == "worked"
    with pytest.raises(ValueError, match=r"s\.jsonl, line 2: no JSON"):
        next(groups)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": None}, "field length: expected a list of at least one integer, got None"),
        ({"length": []}, "field length"),
        ({"lcp": [0, 3, 3, 2.0]}, "field lcp: expected a list"),
        ({"lcp": [0, 3, 3]}, "field lcp: 3 entries for 4 lengths"),
        ({"length": [3, 0, 4, 4]}, "field length: entry 1 is 0"),
        ({"lcp": [1, 3, 3, 2]}, "field lcp: entry 0 is 1, expected 0 to 0"),
        ({"lcp": [0, 3, 4, 2]}, "field lcp: entry 2 is 4, expected 0 to 3"),
        ({"lcp": [0, -1, 3, 2]}, "field lcp: entry 1 is -1"),
        ({"loss_spans": [[]]}, "field loss_spans: expected 4 lists"),
        (
            {"loss_spans": [[[0, 2]], [], [], []]},
            r"field loss_spans: entry 0 holds \[0, 2\], .* begin <= end <= 3",
        ),
        ({"loss_spans": [[], [[3, 6]], [], []]}, "field loss_spans: entry 1"),
        ({"loss_spans": [[], [], [], [4]]}, "field loss_spans: entry 3 holds 4"),
    ],
)
def test_messages_name_file_line_and_field(tmp_path: Path, change: dict[str, object], message: str):
    path = write(tmp_path / "s.jsonl", WORKED, {**WORKED, **change})
    with pytest.raises(ValueError, match=r"s\.jsonl, line 2, " + message):
        list(read_shapes(path))


@pytest.mark.parametrize(
    ("content", "message"), [(b"[1]\n", "record 1: got a int"), (b"\xff\n", "line 1: no JSON"), (None, "is no file")]
)
def test_what_is_no_file_of_objects_is_refused(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "s.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_shapes(path))


def test_a_cut_off_gzip_file_is_refused(tmp_path: Path):
    path = write(tmp_path / "s.jsonl.gz", WORKED)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"s\.jsonl\.gz: damaged after"):
        list(read_shapes(path))
