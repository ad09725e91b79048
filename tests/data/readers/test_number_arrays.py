"""Arrays of numbers read by compiled loops are what the json module reads, on whole and on damaged text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import RolloutGroup, Trajectory
from harts.data.readers import FORMATS, number_arrays, read
from harts.data.readers.number_arrays import parse_object
from tests.data.readers.test_formats import EXAMPLES

MANY = 99


def plain(value: Any) -> Any:
    """With lists for arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """Equal in types and signs of zeros, too."""
    return repr(one) == repr(other)


def check(text: str | bytes) -> bool:
    """Whether arrays were cut out; the values are those of the json module."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    found = parse_object(data)
    if found is None:
        return False
    assert same(plain(found), json.loads(data))
    return True


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([0, 1] * MANY, np.int8),
        ([0] * MANY, np.int8),
        ([0, 1, 2] * MANY, np.int64),
        ([9, 10, 99_999, 100_000, 1_234_567, 12_345_678, 123_456_789, 10**18 - 1] * MANY, np.int64),
        ([-1, 0, -(10**18) + 1] * MANY, np.int64),
        ([True, False, False] * MANY, np.bool_),
        ([-0.5, 0.0, -0.0, 1e-5, 2.25e10, 123456.75] * MANY, np.float64),
    ],
    ids=["bits", "zeros", "small", "digits", "negative", "flags", "floats"],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" ,\t", " :\r\n ")])
def test_arrays(numbers: list[Any], dtype: type, separators: tuple[str, str]):
    for cut in range(8):
        # Eight digits are read together, so where an array ends matters.
        values = numbers[: len(numbers) - cut]
        text = json.dumps({"x": values, "y": [values, "]"]}, separators=separators)
        found = parse_object(text.encode())
        assert found is not None and same(plain(found), json.loads(text))
        assert found["x"].dtype == dtype == found["y"][0].dtype


@pytest.mark.parametrize(
    "text",
    [
        *(
            f'{{"x": [{bad}{", 7" * MANY}]}}'
            for bad in ("01", "00", "-", "-01", "1.", ".5", "+1", "1 2", "", "1e", "tru")
        ),
        *(f'{{"x": [{"7, " * MANY}{bad}]}}' for bad in ("01", "", "1.5", "null", "NaN", "1e5", "7 7", "- 7", "true")),
        *(f'{{"x": [{"0.5, " * MANY}{bad}]}}' for bad in ("01.5", "1", "NaN", "1.e5", "1e+", "1.5.5", "0x1")),
        *(f'{{"x": [{"true, " * MANY}{bad}]}}' for bad in ("1", "tru", "truee", "null", "True")),
        '{"x": [' + "9" * 19 + ", 7" * MANY + "]}",
        '{"x": [' + "1e400, 1.5e-400, " + "0.5, " * MANY + "0.1234567890123456789]}",
        '{"x": [' + "7, " * MANY + "7]",
        '{"x": [' + "7, " * MANY + "7}",
        '{"x": [' + "7, " * MANY + "7], ]}",
        '{"x": 1[' + "7, " * MANY + "7]}",
        '{"x": -[' + "7, " * MANY + "7]}",
        '{"x": [' + "7, " * MANY + "7]1}",
        "{[" + "7, " * MANY + '7]: "x"}',
        '["x", [' + "7, " * MANY + "7]]",
        "[" + "7, " * MANY + "7]",
        '{"x": 0E90, "y": [' + "7, " * MANY + "7]}",
        '{"0E9": 1, "y": [' + "7, " * MANY + "7]}",
    ],
)
def test_anything_else_is_left_to_json(text: str):
    assert not check(text)


def test_arrays_in_strings_are_text():
    array = "[" + "7, " * MANY + "7]"
    value = {array: array, "quoted": f'"{array}', "escaped": f'\\{array}\\"{array}', "real": [7] * MANY, "é[": "\\\\"}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        found = parse_object(text.encode())
        assert found is not None and same(plain(found), value)
        assert isinstance(found["real"], np.ndarray)


def test_the_last_of_equal_names_counts():
    found = parse_object(b'{"x": [' + b"7, " * MANY + b'7], "x": 3, "y": [' + b"8," * MANY + b'8], "y": [1]}')
    assert found == {"x": 3, "y": [1]}


ENTRIES = st.one_of(
    st.integers(-3, 3),
    st.integers(0, 200_000),
    st.integers(-(10**20), 10**20),
    st.booleans(),
    st.floats(),
    st.floats(-9, 9, width=32),
    st.decimals(-9, 9, places=4).map(float),
)
ARRAYS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1),
    st.lists(st.integers(0, 10**9), min_size=1),
    st.lists(st.booleans(), min_size=1),
    st.lists(st.decimals(-9, 9, places=3).map(float), min_size=1),
    st.lists(ENTRIES, max_size=4),
)
TEXTS = st.text('ab"\\[]{},0 é\u2028', max_size=6)
VALUES = st.recursive(
    st.one_of(ARRAYS, TEXTS, st.none(), ENTRIES),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
LAYOUTS = st.sampled_from([(",", ":"), (", ", ": "), (" , ", ":\t")])


@pytest.fixture(autouse=True)
def _cut_short_arrays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "least" in request.fixturenames:
        monkeypatch.setattr(number_arrays, "LEAST", request.getfixturevalue("least"))


@pytest.mark.parametrize("least", [1, 2])
@settings(max_examples=300)
@given(st.dictionaries(TEXTS, VALUES, max_size=4), LAYOUTS)
def test_any_object(least: int, value: dict[str, Any], layout: tuple[str, str]):
    check(json.dumps(value, separators=layout))
    check(json.dumps(value, separators=layout, ensure_ascii=False))


@pytest.mark.parametrize("least", [1])
@settings(max_examples=300)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3), LAYOUTS, st.data())
def test_any_damage(least: int, value: dict[str, Any], layout: tuple[str, str], data: st.DataObject):
    """A byte changed, removed or added: whatever the json module refuses is left to it, the rest is the same."""
    text = json.dumps(value, separators=layout).encode()
    at = data.draw(st.integers(0, len(text) - 1))
    change = data.draw(st.sampled_from([bytes([b]) for b in b'0159-+.eE,[]{}"\\ \ntrx\x00\xff'] + [b"", b"0E9", b"[1"]))
    damaged = text[:at] + change + text[at + data.draw(st.integers(0, 1)) :]
    found = parse_object(damaged)
    if found is not None:
        assert same(plain(found), json.loads(damaged))


@settings(max_examples=200)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=MANY, max_size=MANY))
def test_floats_are_rounded_as_python_rounds(values: list[float]):
    check(json.dumps({"x": values}))
    few = [round(math.copysign(min(abs(value), 1e6), value), 4) for value in values]
    assert check(json.dumps({"x": few}))


def outcome(path: Path) -> Any:
    """What a reader makes of a file: all fields of all trajectories, or its message."""
    try:
        groups = list(read(path))
    except ValueError as error:
        return str(error)
    found = []
    for group in groups:
        assert isinstance(group, RolloutGroup)
        for t in group.trajectories:
            found.append([group.name, *(plain(getattr(t, name)) for name in Trajectory.__slots__)])
    return repr(found)


LONG = {name: json.loads(example) for name, example in EXAMPLES.items() if FORMATS[name].reads_arrays}


def longer(value: Any, times: int) -> Any:
    """All lists of numbers repeated."""
    if isinstance(value, dict):
        return {key: longer(inner, times) for key, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(inner, (int, float)) for inner in value):
        return value * times
    return [longer(inner, times) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", sorted(LONG))
def test_formats_read_arrays_as_they_read_lists(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each number of a record replaced by each odd value: the same trajectories, or the same message."""
    path = tmp_path / "r.jsonl"
    # Of these two, lists belong together in other ways.
    record = LONG[name] if name in ("tinker", "verl") else longer(LONG[name], 3)
    odd = [-1, 0, 1, 2, 0.5, True, None, "x", [1], [], {}, 2**40, 10**30, [7] * 5, [True] * 5, [[7] * 5] * 2, -0.5]
    read_well = 0
    for changed in [record, *(one for value in odd for one in replaced(record, value))]:
        path.write_text(json.dumps(changed))
        monkeypatch.setattr(number_arrays, "LEAST", 2)
        arrays = outcome(path)
        monkeypatch.setattr(number_arrays, "LEAST", 10**9)
        lists = outcome(path)
        assert arrays == lists, changed
        read_well += arrays.startswith("[[")
    assert read_well > 5


def replaced(value: Any, new: Any) -> list[Any]:
    """Copies with one value, or one entry of a list, replaced."""
    found = [new]
    if isinstance(value, dict):
        found += [{**value, key: one} for key, inner in value.items() for one in replaced(inner, new)]
    elif isinstance(value, list) and value:
        found += [
            [*value[:at], one, *value[at + 1 :]] for at in (0, len(value) - 1) for one in replaced(value[at], new)
        ]
    return found
