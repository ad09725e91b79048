"""Block lists against a mask of every pair."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harts.data import TrajectoryBatch
from harts.layout.attention_blocks import (
    GROUPS,
    INDEX_PADDING,
    BlockLists,
    attention_blocks,
    block_lists,
    longest_first,
)
from harts.layout.packed import LayoutNeeds, pack
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

SIZES = [(8, 8), (16, 5), (64, 48), (192, 128)]
WINDOWS = [None, 1, 7, 60]


def arrays_of(up: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Subtree ends and positions of the tree whose token `t` hangs `up[t]` above token `t - 1` (0: below it)."""
    path: list[int] = []
    end, position = np.zeros(len(up), dtype=np.int64), np.zeros(len(up), dtype=np.int64)
    for token, steps in enumerate(up):
        for _ in range(min(steps, len(path))):
            end[path.pop()] = token
        position[token] = len(path)
        path.append(token)
    end[path] = len(up)
    return end, position


def visible(end: NDArray[np.int64], position: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    token = np.arange(end.size)
    mask = (token[None] <= token[:, None]) & (token[:, None] < end[None])
    return mask if window is None else mask & (position[:, None] - position[None] < window)


def expected_rows(mask: NDArray[np.bool_], size: tuple[int, int], by_key: bool) -> tuple[list[list[int]], ...]:
    """Partial and full columns of every row."""
    partial: list[list[int]] = []
    full: list[list[int]] = []
    if by_key:
        mask, size = mask.T, (size[1], size[0])
    for row in range(0, mask.shape[0], size[0]):
        columns = range(0, mask.shape[1], size[1])
        blocks = [mask[row : row + size[0], column : column + size[1]] for column in columns]
        partial.append([i for i, block in enumerate(blocks) if block.any() and not block.all()])
        full.append([i for i, block in enumerate(blocks) if block.all()])
    return partial, full


def listed(lists: BlockLists) -> tuple[list[list[int]], ...]:
    pairs = ((lists.partial_count, lists.partial_index), (lists.full_count, lists.full_index))
    for count, index in pairs:
        assert count.dtype == index.dtype == torch.int32
        assert index.shape[1] == max(1, int(count.max()))  # no wider than needed
    return tuple([row[:n] for row, n in zip(index.tolist(), count.tolist(), strict=True)] for count, index in pairs)


def check(end: NDArray[np.int64], position: NDArray[np.int64], size: tuple[int, int], window: int | None):
    mask = visible(end, position, window)
    for by_key in (False, True):
        actual = listed(block_lists(end, position, block_size=size, window=window, by_key=by_key))
        assert actual == expected_rows(mask, size, by_key)
        if by_key and window is None:
            check_intervals(*actual)


def check_intervals(partial: list[list[int]], full: list[list[int]]):
    """What the backward pass counts on: the queries of a key block are an interval, the full ones another inside."""
    for some, whole in zip(partial, full, strict=True):
        blocks = sorted(some + whole)
        assert blocks == list(range(blocks[0], blocks[-1] + 1))
        assert not whole or whole == list(range(whole[0], whole[-1] + 1))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_named_trees(case: Case, size: tuple[int, int], window: int | None):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1))
    check(layout.subtree_end_T.numpy(), layout.position_T.numpy(), size, window)


@settings(deadline=None, max_examples=400)
@given(
    # Mostly one step on, now and then some way up: long paths with branches.
    up=st.lists(st.one_of(st.just(0), st.just(0), st.integers(0, 12)), min_size=1, max_size=90),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.one_of(st.none(), st.integers(1, 30)),
)
def test_random_trees(up: list[int], size: tuple[int, int], window: int | None):
    check(*arrays_of(up), size, window)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129])
def test_one_path(tokens: int):
    check(np.full(tokens, tokens), np.arange(tokens), (64, 48), None)


def test_worked_example():
    end, position = np.array([8, 8, 6, 5, 5, 6, 8, 8]), np.array([0, 1, 2, 3, 4, 3, 2, 3])
    partial, full = listed(block_lists(end, position, block_size=(2, 2)))
    assert partial == [[0], [1], [1, 2], [3]]
    assert full == [[], [0], [0], [0]]


def test_what_kernels_index():
    end, position = arrays_of([0, 0, 0, 2, 0])
    blocks = attention_blocks(end, position, forward_size=(2, 2), backward_size=(3, 1), window=2)
    assert blocks.forward.block_size == (2, 2) and not blocks.forward.by_key
    assert blocks.backward.block_size == (3, 1) and blocks.backward.by_key
    assert blocks.window_end_T is not None
    pairs = ((blocks.subtree_end_T, end), (blocks.position_T, position), (blocks.window_end_T, position + 2))
    for padded, values in pairs:
        assert padded.dtype == torch.int32
        assert padded.tolist() == values.tolist() + [0] * INDEX_PADDING
    moved = blocks.to(torch.device("meta"))
    tensors = [moved.subtree_end_T, moved.position_T, moved.forward.order, moved.backward.group_ends]
    tensors += [x for lists in (moved.forward, moved.backward) for x in (lists.partial_index, lists.full_count)]
    assert all(tensor.is_meta for tensor in tensors)


@given(length=st.lists(st.integers(0, 2000), min_size=1, max_size=300))
def test_rows_are_ordered_in_groups_of_about_equal_length(length: list[int]):
    order, ends = longest_first(np.array(length, dtype=np.int32))
    assert sorted(order.tolist()) == list(range(len(length)))
    assert ends.size == GROUPS and ends[-1] == len(length)
    groups = [part.tolist() for part in np.split(order, ends[:-1])]
    assert all(group == sorted(group) for group in groups)
    sizes = [[length[row] for row in group] for group in groups if group]
    assert all(2 * min(group) >= max(group) for group in sizes[: GROUPS - 1])
    assert all(min(earlier) >= max(later) for earlier, later in itertools.pairwise(sizes))


def test_window_of_nothing_is_refused():
    with pytest.raises(ValueError, match="window is 0"):
        block_lists(np.array([1]), np.array([0]), block_size=(1, 1), window=0)


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize("turn", [1, 64, 4096])
def test_hundred_thousand_tokens_take_milliseconds(turn: int, window: int | None):
    """A trunk with a side leaf after every turn, which lexicographic order may put first: as deep as a tree gets."""
    up = [0] * 100_000
    up[2 * turn :: 2 * turn] = [turn] * len(up[2 * turn :: 2 * turn])
    end, position = arrays_of(up)
    block_lists(end[:200], position[:200], block_size=(64, 64))  # compiles
    began = time.perf_counter()
    block_lists(end, position, block_size=(128, 64), window=window)
    assert time.perf_counter() - began < 0.25
