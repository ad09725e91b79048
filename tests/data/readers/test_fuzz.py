"""Any input gives trajectories that can be trained, or a ValueError that names the file; nothing else, and no hang.

Inputs are examples of all formats, with values replaced, removed and added, whole files cut and bytes changed.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harts.data import RolloutGroup, Trajectory, TrajectoryBatch
from harts.data.readers import FORMATS, GroupShape, SkippedLines, read
from harts.tree import build_prefix_tree, tree_from_lcp
from tests.data.letters import byte_tokenizer
from tests.data.readers.test_formats import EXAMPLES

DEEP: Any = []
for _ in range(600):
    DEEP = [DEEP]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        3,
        2**31,
        2**62,
        2**63,
        -(2**70),
        10**400,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *("", "x", "role", "\ud800", "\u0000", "<|im_end|>", "é\u0301", [], {}, [[]], [{}], [None], [0], [1, 2, 3], ["a"]),
    *(
        DEEP,
        {"role": "assistant", "content": "z"},
        [{"role": "user", "content": None}],
        {"tokens": [1]},
        {"data": [1.5]},
    ),
]
SECONDS = 2.0


def mutate(value: Any, choose: random.Random) -> Any:
    """One place of a JSON value changed."""
    if isinstance(value, dict) and value and choose.random() < 0.85:
        key = choose.choice(list(value))
        what = choose.random()
        if what < 0.1:
            return {other: value[other] for other in value if other != key}
        if what < 0.2:
            return {**value, choose.choice(NAMES): choose.choice(ODD)}
        return {**value, key: mutate(value[key], choose)}
    if isinstance(value, list) and value and choose.random() < 0.8:
        at = choose.randrange(len(value))
        what = choose.random()
        if what < 0.15:
            return value[:at] + value[at + 1 :]
        if what < 0.3:
            return [*value[:at], choose.choice(ODD), *value[at:]]
        return [*value[:at], mutate(value[at], choose), *value[at + 1 :]]
    return choose.choice(ODD)


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


PARSED = {name: json.loads(example) for name, example in EXAMPLES.items()}
NAMES = sorted(keys_of(list(PARSED.values())))


def build(seed: int) -> tuple[bytes, dict[str, Any]]:
    """A file, and options to read it with."""
    choose = random.Random(seed)
    name = choose.choice(sorted(FORMATS))
    values = [PARSED[name]] * choose.choice([1, 1, 2, 3])
    for _ in range(choose.choice([0, 1, 1, 2, 4])):
        at = choose.randrange(len(values))
        values = [*values[:at], mutate(values[at], choose), *values[at + 1 :]]
    if len(values) == 1 and choose.random() < 0.5:
        text = json.dumps(values[0], indent=choose.choice([None, 1]))
    elif choose.random() < 0.3:
        text = json.dumps(values, indent=choose.choice([None, 1]))
    else:
        text = "\n".join(json.dumps(value) for value in values)
    data = text.encode("utf-8", "surrogatepass")
    if choose.random() < 0.2 and data:
        at = choose.randrange(len(data))
        data = choose.choice([data[:at], data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :], data[at:]])
    if choose.random() < 0.1:
        data = gzip.compress(data)
        data = data[: choose.choice([len(data), choose.randrange(len(data))])]
    options: dict[str, Any] = {"samples": choose.choice(["final", "calls", "calls-last1"])}
    if choose.random() < 0.3:
        options["format"] = choose.choice([name, choose.choice(sorted(FORMATS))])
    if choose.random() < 0.3:
        options["skip_bad"] = SkippedLines()
    return data, options


def check(path: Path, data: bytes, options: dict[str, Any]) -> bool:
    """Whether it was read."""
    path.write_bytes(data)
    begin, refused = time.perf_counter(), None
    groups: list[RolloutGroup | GroupShape] = []
    try:
        groups = list(read(path, tokenizer=TOKENIZER, **options))
    except ValueError as error:
        refused = error
    assert time.perf_counter() - begin < SECONDS
    if refused is not None:
        assert type(refused) is ValueError, repr(refused)
        assert str(path) in str(refused), refused
        return False
    for group in groups:
        if isinstance(group, GroupShape):
            tree_from_lcp(np.arange(group.length_N.size), group.length_N, group.lcp_N)
        else:
            assert group.trajectories
            assert len({trajectory.group_id for trajectory in group.trajectories}) == 1
            for trajectory in group.trajectories:
                check_trajectory(trajectory)
    return True


def check_trajectory(trajectory: Trajectory) -> None:
    batch = TrajectoryBatch.of([trajectory])
    assert build_prefix_tree(batch).num_tokens == len(trajectory)


TOKENIZER = byte_tokenizer()


def run(path: Path, seeds: range) -> None:
    read_well = 0
    for seed in seeds:
        data, options = build(seed)
        # Pytest shows it if the test fails; the file is the one that was read last.
        sys.stdout.write(f"\rseed {seed} {options}")
        read_well += check(path, data, options)
    # Neither everything nor nothing is damaged.
    assert 0.1 < read_well / len(seeds) < 0.9


def test_changed_examples(tmp_path: Path):
    run(tmp_path / "fuzzed.json", range(600))


@pytest.mark.slow
def test_a_hundred_thousand_changed_examples(tmp_path: Path):
    run(tmp_path / "fuzzed.json", range(1000, 101_000))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, data: bytes):
    check(tmp_path / "bytes.json", data, {})


def column_values(choose: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: [choose.randrange(-1, 9) for _ in range(choose.randrange(4))],
        lambda: [choose.random() for _ in range(3)],
        lambda: choose.choice([None, 1, 2.5, "x", True]),
    ]
    return choose.choice(kinds)()


@pytest.mark.parametrize("seed", range(60))
def test_any_columns(tmp_path: Path, seed: int):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    choose = random.Random(seed)
    columns = {name: [column_values(choose)] * 2 for name in choose.sample(NAMES, 4)}
    columns |= {
        name: [column_values(choose)] * 2 for name in choose.choice([["input_ids"], ["prompt_ids", "completion_ids"]])
    }
    parquet.write_table(pa.table(columns), tmp_path / "fuzzed.parquet")
    data = (tmp_path / "fuzzed.parquet").read_bytes()
    check(tmp_path / "fuzzed.parquet", data, {"skip_bad": choose.choice([None, SkippedLines()])})
    at = choose.randrange(len(data))
    check(tmp_path / "fuzzed.parquet", data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :], {})


def test_groups_are_rollouts_or_shapes(tmp_path: Path):
    """The fuzz would miss a third kind."""
    for name, example in EXAMPLES.items():
        (tmp_path / "x.json").write_text(example)
        (group,) = read(tmp_path / "x.json", tokenizer=TOKENIZER)
        assert isinstance(group, GroupShape if name == "shapes" else RolloutGroup)
