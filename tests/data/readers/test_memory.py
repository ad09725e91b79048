"""Files of any size are read in memory that one group bounds."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harts.data import RolloutGroup, rendering
from harts.data.readers import read
from tests.data.letters import byte_tokenizer

Row = Callable[[int, int], dict[str, object]]


def tokens(number: int, tasks: int) -> dict[str, object]:
    return {"token_ids": list(range(1000, 3000)), "group_id": number % tasks}


def messages(number: int, tasks: int) -> dict[str, object]:
    said = [{"role": "user", "content": f"{number} " + "x" * 4000}, {"role": "assistant", "content": "y" * 4000}]
    return {"task_id": number % tasks, "messages": said}


def write(path: Path, row: Row, *, size: int, form: str) -> int:
    """Rounds of tasks with two attempts each, until the file has the size; how many tasks."""
    tasks = size // len(json.dumps(row(0, 1))) // 2
    with gzip.open(path, "wt", compresslevel=1) if path.suffix == ".gz" else path.open("w") as file:
        file.write("[\n" if form == "array" else "")
        for number in range(2 * tasks):
            between = ",\n" if form == "array" and number < 2 * tasks - 1 else "\n"
            file.write(json.dumps(row(number, tasks)) + between)
        file.write("]\n" if form == "array" else "")
    return tasks


def check(path: Path, tasks: int, *, most: int) -> None:
    tokenizer = byte_tokenizer()
    next(read(path, tokenizer=tokenizer))
    tracemalloc.start()
    try:
        found = 0
        for group in read(path, tokenizer=tokenizer):
            assert isinstance(group, RolloutGroup) and len(group.trajectories) == 2
            found += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == tasks
    assert peak < most, f"{peak / 1e6:.1f} MB"


# Buffers of 1 MiB, one group, and the texts that are kept once they are tokenised.
@pytest.mark.parametrize(
    ("name", "row", "size", "most"),
    [
        ("r.jsonl", tokens, 6_000_000, 3_000_000),
        ("r.jsonl.gz", messages, 12_000_000, 10_000_000),
        pytest.param("r.jsonl.gz", messages, 40_000_000, 10_000_000, marks=pytest.mark.slow),
        pytest.param("r.json", messages, 40_000_000, 10_000_000, marks=pytest.mark.slow),
    ],
)
def test_memory_is_a_fraction_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: Row, size: int, most: int
):
    monkeypatch.setattr(rendering, "CACHED_TOKENS", 100_000)
    tasks = write(tmp_path / name, row, size=size, form="array" if name == "r.json" else "lines")
    check(tmp_path / name, tasks, most=most)


def test_parquet(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    schema = pa.schema({"token_ids": pa.list_(pa.int64()), "group_id": pa.int64()})
    with parquet.ParquetWriter(tmp_path / "r.parquet", schema) as writer:
        for group in range(500):
            rows = {"token_ids": np.arange(8000).reshape(4, 2000).tolist(), "group_id": [group] * 4}
            writer.write_table(pa.table(rows, schema=schema))
    groups = list(read(tmp_path / "r.parquet"))
    assert len(groups) == 500
    # pyarrow has an allocator of its own.
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - before for _ in read(tmp_path / "r.parquet"))
    assert most < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("row", [tokens, messages])
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "r.json"])
def test_200_mb(tmp_path: Path, row: Row, name: str):
    form = "array" if name == "r.json" else "lines"
    tasks = write(tmp_path / name, row, size=200_000_000, form=form)
    # Texts that were seen are kept up to a limit (`CACHED_TOKENS`).
    check(tmp_path / name, tasks, most=20_000_000 if row is tokens else 150_000_000)


@pytest.mark.slow
def test_ten_million_ids(tmp_path: Path):
    """As the benchmark of 10^9 does it: all numbers right, and no more memory than libraries take."""
    # Of its own: the peak that the system reports for a process begins with that of the process that started it.
    command = [sys.executable, "-m", "benchmarks.readers", "--tokens", "1e7", "--folder", str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    ran = subprocess.run([*command, "--no-report", "--json"], cwd=root, capture_output=True, text=True, check=True)
    for row in json.loads(ran.stdout)["runs"]:
        # Libraries take 160 MB; PyTorch would take 300 more.
        assert row["peak memory, MB"] < 300
        assert row["CPU seconds"] < 20
