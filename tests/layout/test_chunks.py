"""Chunk tables: executed symbolically, they must cut every trajectory where it would be cut alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.layout.chunks import ChunkTable, chunk_table
from harts.layout.rounds import plan_runs
from harts.tree import build_prefix_tree

EXAMPLE = ["abcde", "abxy", "abcz", "abc"]
words_strategy = st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=10)


def table_of(words: list[str], chunk_size: int, *, replay: bool = True) -> ChunkTable:
    tree = build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))
    return chunk_table(plan_runs(tree, chunk_size, replay=replay))


def prefixes_of(words: list[str]) -> list[str]:
    return sorted({word[: d + 1] for word in words for d in range(len(word))})


def execute(table: ChunkTable, letters: list[str]) -> list[str]:
    """For each token, the path that its output has seen, with a bar where chunks meet."""
    states: list[str] = []
    outputs: list[str] = []
    for tokens, parent in zip(table.token_GC, table.parent_G, strict=True):
        state = "" if parent < 0 else states[parent] + "|"
        for token in tokens:
            state += letters[token] if token >= 0 else ""
            outputs.append(state)
        states.append(state)
    return [outputs[slot] for slot in table.slot_T]


def cut_alone(path: str, chunk_size: int) -> str:
    return "|".join(path[i : i + chunk_size] for i in range(0, len(path), chunk_size))


def check_structure(table: ChunkTable, num_tokens: int) -> None:
    G, _ = table.token_GC.shape
    assert table.level_offsets[0] == 0 and table.level_offsets[-1] == G
    assert (np.diff(table.level_offsets) > 0).all()
    level_G = np.repeat(np.arange(table.num_levels), np.diff(table.level_offsets))
    has_parent_G = table.parent_G >= 0
    assert (has_parent_G == (level_G > 0)).all()
    assert (level_G[table.parent_G[has_parent_G]] == level_G[has_parent_G] - 1).all()
    assert table.token_GC.flat[table.slot_T].tolist() == list(range(num_tokens))
    padding_GC = table.token_GC < 0
    assert not padding_GC[:, 0].any()
    assert (np.diff(padding_GC.astype(int), axis=1) >= 0).all(), "padding is at the end of a chunk"


@given(words_strategy, st.integers(1, 5))
def test_every_token_sees_the_chunks_of_its_trajectory_alone(words, chunk_size):
    prefixes = prefixes_of(words)
    table = table_of(words, chunk_size)
    check_structure(table, len(prefixes))
    assert execute(table, [p[-1] for p in prefixes]) == [cut_alone(p, chunk_size) for p in prefixes]
    padded_G = (table.token_GC < 0).any(axis=1)
    assert not padded_G[table.parent_G[table.parent_G >= 0]].any()
    assert table.num_levels == -(-max(map(len, words)) // chunk_size)


@given(words_strategy, st.integers(1, 5))
def test_without_replay_every_token_still_sees_its_path(words, chunk_size):
    prefixes = prefixes_of(words)
    table = table_of(words, chunk_size, replay=False)
    check_structure(table, len(prefixes))
    assert [seen.replace("|", "") for seen in execute(table, [p[-1] for p in prefixes])] == prefixes


def test_without_replay_chunk_boundaries_move():
    prefixes = prefixes_of(EXAMPLE)
    seen = execute(table_of(EXAMPLE, 4, replay=False), [p[-1] for p in prefixes])
    assert seen == ["a", "ab", "ab|c", "ab|c|d", "ab|c|de", "ab|c|z", "ab|x", "ab|xy"]
    assert seen != [cut_alone(p, 4) for p in prefixes]


def test_worked_example_is_the_one_of_the_docstring():
    table = table_of(EXAMPLE, 2)
    assert table.token_GC.tolist() == [[0, 1], [2, 3], [2, 5], [6, 7], [4, -1]]
    assert table.parent_G.tolist() == [-1, 0, 0, 0, 1]
    assert table.level_offsets.tolist() == [0, 1, 4, 5]
    assert table.slot_T.tolist() == [0, 1, 2, 3, 8, 5, 6, 7]
    assert table.token_GC.dtype == table.parent_G.dtype == table.level_offsets.dtype == table.slot_T.dtype == np.int64


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
def test_one_trajectory_is_a_plain_list_of_chunks(length):
    table = table_of(["a" * length], 64)
    G = -(-length // 64)
    assert table.parent_G.tolist() == list(range(-1, G - 1))
    assert table.token_GC.reshape(-1)[:length].tolist() == list(range(length))
    assert (table.token_GC < 0).sum() == G * 64 - length
