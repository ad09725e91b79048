"""Lists in parquet and arrow columns are slices of arrays, with the values that pyarrow's own conversion gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data.readers.columns import ARROW_MAGIC, PARQUET_MAGIC, ArrowRows

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LISTS = {
    "bools": ([[True, False], [], [False] * 3], pa.list_(pa.bool_()), np.bool_),
    "integers": ([[1, 2], [3], []], pa.large_list(pa.int32()), np.int32),
    "missing rows": ([[1, 2], None, [3]], pa.list_(pa.int64()), np.int64),
    "fixed": ([[1.5, 2.5], [3.5, 4.5], [5.5, 6.5]], pa.list_(pa.float32(), 2), np.float32),
    "nested": ([[[True], [False, True]], [], [[]]], pa.list_(pa.list_(pa.bool_())), list),
    "missing entries": ([[True, None], [], [False]], pa.list_(pa.bool_()), list),
    "words": ([["a"], [], ["b", "c"]], pa.list_(pa.string()), list),
}


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def rows(path: Path, magic: bytes) -> list[Any]:
    return [item.load().fields.get("x") for item in ArrowRows(path, magic)]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("copies", [1, 200])
def test_lists(tmp_path: Path, name: str, copies: int):
    values, kind, dtype = LISTS[name]
    table = pa.table({"x": pa.array(values * copies, type=kind)})
    parquet.write_table(table, tmp_path / "x.parquet")
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as file:
        # One large batch is cut, so later rows do not begin at 0.
        file.write_table(table)
    for found in (rows(tmp_path / "x.parquet", PARQUET_MAGIC), rows(tmp_path / "x.arrow", ARROW_MAGIC)):
        assert [plain(value) for value in found] == values * copies
        first = found[0]
        assert isinstance(first, list) if dtype is list else first.dtype == dtype


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.none(), st.lists(st.lists(st.booleans(), max_size=3), max_size=3)), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_any_nested_lists(tmp_path_factory: pytest.TempPathFactory, values: list[Any], skipped: int):
    path = tmp_path_factory.mktemp("columns") / "x.arrow"
    table = pa.table({"x": pa.array(values, type=pa.list_(pa.list_(pa.bool_())))}).slice(skipped)
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)
    assert [plain(value) for value in rows(path, ARROW_MAGIC)] == values[skipped:]
