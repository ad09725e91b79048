"""Records of JSON files: lines, arrays and documents, wherever a buffer ends; damage is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data.readers import json_records
from harts.data.readers.json_records import JsonRecords
from harts.data.readers.source import Source

RECORDS = [{"a": 1, "s": 'x]"}\\'}, {"b": [1, {"c": [2]}]}, {"d": "é\u2028[", "e": {}}]
MESSAGES = [{"role": "user", "content": "["}, {"role": "assistant", "content": "}"}]


def read_back(path: Path) -> tuple[list[Any], list[str]]:
    """The values and places of all records, after checking that they are the same by number."""
    records = JsonRecords(path)
    items = list(records)
    numbers = [number for number, _ in reversed(list(enumerate(items)))]
    assert [item.data for item in records.at(numbers)] == [item.data for item in reversed(items)]
    places = [item.place.removeprefix(str(path)) for item in items]
    return [json.loads(item.data) for item in items], places


@pytest.mark.parametrize("chunk", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_arrays_and_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, indent: int | None):
    monkeypatch.setattr(json_records, "CHUNK", chunk)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(RECORDS, indent=indent))
    assert read_back(path) == (RECORDS, [", record 1", ", record 2", ", record 3"])
    document = {"info": {"simulations": [0], "x": "simulations"}, "simulations": RECORDS, "after": [{}]}
    path.write_text(json.dumps(document, indent=indent))
    assert read_back(path)[0] == RECORDS
    (first, *_) = JsonRecords(path)
    assert first.load().shared["info"] == document["info"]
    path.write_text(json.dumps(RECORDS[1], indent=indent))
    assert read_back(path)[0] == [RECORDS[1]]
    path.write_text(json.dumps(MESSAGES, indent=indent))
    assert read_back(path)[0] == [MESSAGES]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
@pytest.mark.parametrize("compress", [False, True])
def test_lines(tmp_path: Path, end: str, compress: bool):
    text = end.join(map(json.dumps, RECORDS)).encode("utf-8-sig")
    path = tmp_path / "r.jsonl"
    path.write_bytes(gzip.compress(text) if compress else text)
    values, places = read_back(path)
    assert values == RECORDS
    assert places[1] == f", line {3 if end == chr(10) * 2 else 2}"


def test_a_compressed_file_is_decompressed_a_few_times_however_many_records_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = "\n".join(map(json.dumps, RECORDS * 4)).encode()
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(text))
    opened: list[Path] = []
    access = json_records._random_access

    def counted(source: Source) -> BinaryIO:
        opened.append(source.path)
        return access(source)

    monkeypatch.setattr(json_records, "_random_access", counted)
    monkeypatch.setattr(json_records, "KEPT_AFTER", 3 * len(text))
    records = JsonRecords(path)
    items = list(records)
    assert [next(records.at([number])).data for number in range(12)] == [item.data for item in items]
    assert len(opened) == 4


def test_lines_of_messages(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(MESSAGES) + "\n" + json.dumps(MESSAGES[:1]) + "\n")
    assert read_back(path)[0] == [MESSAGES, MESSAGES[:1]]
    assert [len(item.load().fields["messages"]) for item in JsonRecords(path)] == [2, 1]


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('{"a": 1}\n{"a": \n{"a": 3}\n', 2, ["line 2"]),
        ('{"a": \n{"a": 2}\n', 1, ["line 1"]),
        ('[{"a": 1}, {"a": 2}', 2, ["record 3"]),
        ('[\n{"a": 1},\n{"a": ', 1, ["record 2"]),
        ('[{"a": 1}, 7, {"a": 2}]', 1, ["record 2"]),
        ('[{"a": 1}, 7]', 1, ["record 2"]),
        ('{\n"a": [1,\n', 0, ["record 1"]),
        ('{"a": 1}\nnull\n3\n"x"\n', 1, ["line 2", "line 3", "line 4"]),
        ("[[[[", 0, ["record 1"]),
        ("[" * 100_000, 0, ["record 1"]),
        ('{"a": ' + "9" * 5000 + "}\n{}\n", 1, ["line 1"]),
    ],
)
def test_damage_is_named_and_the_rest_is_read(tmp_path: Path, text: str, good: int, bad: list[str]):
    path = tmp_path / "r.json"
    path.write_text(text)
    loaded, errors = 0, []
    for item in JsonRecords(path):
        try:
            item.load()
            loaded += 1
        except ValueError as error:
            errors.append(str(error))
    assert loaded == good
    assert len(errors) == len(bad)
    assert all(f"{path}, {place}" in error for error, place in zip(errors, bad, strict=True))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def test_the_middle_of_a_long_line_is_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Detection reads a few pieces of lines; a piece that happens to be JSON says nothing about the file."""
    monkeypatch.setattr(json_records, "CHUNK", 5)
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"[[[[": []}], indent=1))
    assert read_back(path)[0] == [{"[[[[": []}]


@settings(max_examples=100)
@given(st.lists(st.dictionaries(st.text('ab"\\[]{}', max_size=4), JSON, max_size=3), min_size=1, max_size=4), st.data())
def test_any_records_come_back(tmp_path_factory: pytest.TempPathFactory, records: list[Any], data: st.DataObject):
    path = tmp_path_factory.mktemp("json") / "r.json"
    form = data.draw(st.sampled_from(["lines", "array", "indented"]))
    text = (
        "\n".join(map(json.dumps, records))
        if form == "lines"
        else json.dumps(records, indent=1 if form[0] == "i" else None)
    )
    path.write_text(text)
    original, json_records.CHUNK = json_records.CHUNK, data.draw(st.sampled_from([1, 5, 64, 1 << 20]))
    try:
        assert read_back(path)[0] == records
    finally:
        json_records.CHUNK = original
