"""The single launch: its runs spell paths, its states are those of the paths, and no queue can deadlock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.layout.launch import (
    LaunchPlan,
    backward_queue,
    forward_queue,
    launch_index,
    plan_launch,
    trunk_first,
    trunk_first_pays,
)
from harts.layout.rounds import plan_runs
from harts.tree import tree_from_lcp
from tests.layout.building import prefixes_of, random_segments, tree_of, tree_of_segments

EXAMPLE = ["abcde", "abxy", "abcz", "abc"]  # packed: a b c d e z x y
words_strategy = st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=10)


def states_by_definition(plan: LaunchPlan, prefixes: list[str]) -> list[str]:
    """What each run has read before its first row, found by doing what a kernel does, in the forward queue's order."""
    first_chunk = np.cumsum(plan.chunks_of_run) - plan.chunks_of_run
    published: dict[int, str] = {}
    before = [""] * plan.chunks_of_run.size
    for run in forward_queue(plan):
        slot = int(plan.start_slot[run])
        read = before[run] = "" if slot < 0 else published[slot]  # KeyError: not yet there, a deadlock
        rows = plan.token_R[plan.run_offsets[run] : plan.run_offsets[run + 1]]
        for number, begin in enumerate(range(0, rows.size, plan.chunk_size)):
            slot = int(plan.slot_G[first_chunk[run] + number])
            if slot >= 0:
                assert slot not in published and number > 0
                published[slot] = read
            read += "".join(prefixes[t][-1] for t in rows[begin : begin + plan.chunk_size])
    assert len(published) == plan.num_slots
    return before


def check(plan: LaunchPlan, words: list[str]) -> None:
    prefixes = prefixes_of(words)
    before = states_by_definition(plan, prefixes)
    for run, read in enumerate(before):
        assert len(read) % plan.chunk_size == 0
        rows = plan.token_R[plan.run_offsets[run] : plan.run_offsets[run + 1]]
        for nth, token in enumerate(rows.tolist()):
            assert prefixes[token] == read + "".join(prefixes[t][-1] for t in rows[: nth + 1].tolist())
    assert plan.token_R[plan.owner_T].tolist() == list(range(len(prefixes)))
    leaves = [p for p in prefixes if not any(q.startswith(p) and q != p for q in prefixes)]
    assert len(before) == len(leaves)
    check_backward(plan)


def check_backward(plan: LaunchPlan) -> None:
    """Every run stands behind all that start inside it."""
    place = np.argsort(backward_queue(plan))
    run_G = np.repeat(np.arange(place.size), plan.chunks_of_run)
    source_of_slot = run_G[np.flatnonzero(plan.slot_G >= 0)]
    for run, slot in enumerate(plan.start_slot):
        assert slot < 0 or place[run] < place[source_of_slot[slot]]


def test_example() -> None:
    plan = plan_launch(tree_of(EXAMPLE), 2)
    assert plan.run_offsets.tolist() == [0, 5, 7, 9]
    assert plan.token_R.tolist() == [0, 1, 2, 3, 4, 2, 5, 6, 7]
    assert plan.start_slot.tolist() == [-1, 0, 0]
    assert plan.slot_G.tolist() == [-1, 0, -1, -1, -1]
    assert plan.owner_T.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    check(plan, EXAMPLE)


@given(words=words_strategy, chunk_size=st.integers(1, 5))
def test_words(words: list[str], chunk_size: int) -> None:
    tree = tree_of(words)
    plan = plan_launch(tree, chunk_size)
    check(plan, words)
    assert plan.token_R.size - plan.owner_T.size == plan_runs(tree, chunk_size).num_replayed


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_large_random_trees(chunk_size: int) -> None:
    tree = tree_of_segments(random_segments(3_000, range(1, 80)))
    plan = plan_launch(tree, chunk_size)
    place = np.argsort(forward_queue(plan))
    run_G = np.repeat(np.arange(place.size), plan.chunks_of_run)
    source_of_slot = run_G[np.flatnonzero(plan.slot_G >= 0)]
    waiting = plan.start_slot >= 0
    assert (place[waiting] > place[source_of_slot[plan.start_slot[waiting]]]).all()
    check_backward(plan)


def test_index_of_a_launch() -> None:
    """Runs that start from one slot are listed together, in ascending order."""
    index = launch_index(plan_launch(tree_of(EXAMPLE), 2))
    assert index.slot_offsets.tolist() == [0, 2] and index.slot_runs.tolist() == [1, 2]
    assert index.chunk_indices.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [2, 0]]
    assert index.num_runs == 3 and index.num_slots == 1
    assert index.backward_queue[:, 0].tolist() == [1, 2, 0] and index.trunk_first_queue[:, 0].tolist() == [0, 1, 2]
    # Run, first row, rows, first chunk, start slot.
    assert index.forward_queue.tolist() == [[0, 0, 5, 0, -1], [1, 5, 2, 3, 0], [2, 7, 2, 4, 0]]
    assert index.mean_parallel_runs == 5 / 3


@given(words=words_strategy, chunk_size=st.integers(1, 5))
def test_only_the_first_of_the_trunk_first_queue_waits(words: list[str], chunk_size: int) -> None:
    """It starts from nothing itself, so nothing waits for it, and the others keep their order."""
    plan = plan_launch(tree_of(words), chunk_size)
    queue = backward_queue(plan)
    first, *others = trunk_first(plan, queue).tolist()
    assert plan.start_slot[first] == -1 and others == [run for run in queue.tolist() if run != first]


def test_without_branches() -> None:
    """No state is handed over; kernels still get a valid list of runs."""
    index = launch_index(plan_launch(tree_from_lcp([0], [9], [0]), 4))
    assert index.num_slots == 0 and index.slot_runs.numel() == 1


def test_chunk_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="Got chunk_size 0"):
        plan_launch(tree_of(EXAMPLE), 0)


def test_a_trunk_goes_first_where_branches_leave_all_along_it() -> None:
    """Not where it would wait for nearly everything at one place, nor where nothing leaves it."""
    depths = [300 - 30 * i for i in range(10)]
    along = tree_from_lcp(range(11), [320] + [depth + 30 for depth in depths], [0, *depths])
    prefix = tree_from_lcp(range(12), [160] * 12, [0] + [128] * 11)
    alone = tree_from_lcp([0], [320], [0])
    forest = tree_from_lcp([0, 1], [320, 320], [0, 0])
    found = [trunk_first_pays(plan_launch(tree, 1)) for tree in (along, prefix, alone, forest)]
    assert found == [True, False, False, True]
