"""Rounds of runs: valid, no more than needed, and a critical path close to the longest path."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.layout import descent
from harts.layout.rounds import plan_runs
from harts.layout.schedule import critical_path, earliest_rounds, latest_rounds, schedule
from tests.layout.brute_force import shortest_critical_path
from tests.layout.building import Segments, caterpillar, random_segments, tree_of_segments
from tests.layout.exact import shortest_by_cp_sat

forests = st.integers(1, 60).flatmap(
    lambda n: st.tuples(
        st.tuples(*(st.integers(-1, i - 1) for i in range(n))).map(lambda p: np.array(p, dtype=np.int64)),
        st.lists(st.integers(1, 9), min_size=n, max_size=n).map(lambda w: np.array(w, dtype=np.int64)),
    )
)


def lines(*runs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Parents and chunks of runs."""
    return np.array([parent for parent, _ in runs]), np.array([chunks for _, chunks in runs])


def is_valid(parent: np.ndarray, rounds: np.ndarray) -> bool:
    return bool(((parent < 0) | (rounds > rounds[parent])).all())


# A trunk of three runs, and side branches that start beside its second.
NAMED = {
    "earliest is best": (lines((-1, 1), (0, 9), (1, 1), (0, 9), (3, 1)), [0, 1, 2, 1, 2]),
    "a long branch waits for the trunk's long run": (lines((-1, 1), (0, 1), (1, 9), (0, 9)), [0, 1, 2, 2]),
    # Earliest: 7 in the first round. Latest: 5 in the last. Neither is as short as the middle round for both.
    "branches meet in the middle": (lines((-1, 1), (0, 7), (1, 1), (-1, 7), (3, 1), (0, 5)), [0, 1, 2, 1, 2, 1]),
}


@pytest.mark.parametrize(("forest", "expected"), NAMED.values(), ids=NAMED.keys())
def test_named_forests(forest, expected):
    assert schedule(*forest).tolist() == expected


def test_the_descent_beats_both_ends():
    parent, chunks = NAMED["branches meet in the middle"][0]
    ends = [earliest_rounds(parent), latest_rounds(parent, 3)]
    assert [critical_path(rounds, chunks) for rounds in ends] == [15, 13]
    assert critical_path(schedule(parent, chunks), chunks) == 9


@given(forests)
def test_schedules_are_valid_and_no_longer_than_both_ends(forest):
    parent, chunks = forest
    earliest = earliest_rounds(parent)
    num_rounds = int(earliest.max()) + 1
    latest = latest_rounds(parent, num_rounds)
    rounds = schedule(parent, chunks)
    assert is_valid(parent, latest) and is_valid(parent, rounds)
    assert (earliest <= rounds).all() and (rounds <= latest).all()
    assert latest.max() == rounds.max() == num_rounds - 1
    assert set(rounds.tolist()) == set(range(num_rounds))
    assert critical_path(rounds, chunks) <= min(critical_path(earliest, chunks), critical_path(latest, chunks))


@given(forests)
def test_a_descent_leaves_no_limit_that_could_be_lowered(forest):
    parent, chunks = forest
    earliest = earliest_rounds(parent)
    latest = latest_rounds(parent, int(earliest.max()) + 1)
    for start in (earliest, latest):
        rounds = descent.descend(parent, chunks, start=start, latest=latest)
        assert is_valid(parent, rounds) and (rounds <= latest).all()
        assert critical_path(rounds, chunks) <= critical_path(start, chunks)
        limit = np.zeros(latest.max() + 1, dtype=np.int64)
        np.maximum.at(limit, rounds, chunks)
        for lowered in range(limit.size):
            limit[lowered] -= 1
            assert not some_schedule_keeps(parent, chunks, limit)
            limit[lowered] += 1


def test_a_round_that_long_runs_left_does_not_take_others_of_middle_length():
    parent, chunks = lines((-1, 1), (0, 1), (1, 1), (2, 3), (0, 2), (1, 3))
    earliest, latest = earliest_rounds(parent), latest_rounds(parent, 4)
    rounds = descent.descend(parent, chunks, start=earliest, latest=latest)
    assert critical_path(rounds, chunks) == 6


def some_schedule_keeps(parent: np.ndarray, chunks: np.ndarray, limit: np.ndarray) -> bool:
    rounds: list[int] = []
    for above, count in zip(parent.tolist(), chunks.tolist(), strict=True):
        free = [r for r in range(rounds[above] + 1 if above >= 0 else 0, limit.size) if limit[r] >= count]
        if not free:
            return False
        rounds.append(free[0])
    return True


def test_close_to_the_shortest_of_all_schedules():
    """The descent may stop early, but seldom and not far; the best of all schedules is never undercut."""
    rng, excess = random.Random(0), []
    for _ in range(400):
        n = rng.randint(2, 8)
        parent = [rng.randint(-1, i - 1) for i in range(n)]
        chunks = [rng.randint(1, 9) for _ in range(n)]
        rounds = schedule(np.array(parent), np.array(chunks))
        length = critical_path(rounds, np.array(chunks))
        excess.append(length / shortest_critical_path(parent, chunks, int(rounds.max()) + 1) - 1)
    assert min(excess) == 0
    assert np.mean(np.array(excess) > 0) < 0.05 and np.mean(excess) < 0.01


def runs_of(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Parents and chunks of a tree's runs."""
    runs = plan_runs(tree_of_segments(segments), 64)
    return runs.run_parent, -(-np.diff(runs.run_offsets) // 64)


def test_close_to_the_shortest_schedule_of_trees():
    """Trees on which no schedule comes close to the longest path: branches as heavy as trunks, few rounds."""
    pytest.importorskip("ortools")
    trees = [caterpillar(20, range(10, 900), range(10, 900), branching=4, seed=seed) for seed in range(4)]
    trees += [random_segments(90, range(20, 900), seed=seed) for seed in range(4)]
    excess = []
    for parent, chunks in map(runs_of, trees):
        excess.append(critical_path(schedule(parent, chunks), chunks) / shortest_by_cp_sat(parent, chunks) - 1)
    assert min(excess) >= 0
    assert np.mean(excess) < 0.07


CATERPILLARS = {
    f"{name}, {seed}": {**settings, "seed": seed}
    for seed in range(4)
    for name, settings in {
        "50 side leaves": {"num_branches": 50, "trunk": range(100, 1700), "side": range(100, 3000)},
        "200 side leaves": {"num_branches": 200, "trunk": range(20, 420), "side": range(20, 800)},
        "200 side leaves up to ten trunk pieces long": {
            "num_branches": 200,
            "trunk": range(20, 420),
            "side": range(20, 4000),
        },
        "200 side branches that branch": {
            "num_branches": 200,
            "trunk": range(20, 420),
            "side": range(20, 420),
            "branching": 3,
        },
        "a trunk shorter than a chunk a piece": {"num_branches": 300, "trunk": range(1, 40), "side": range(1, 90)},
    }.items()
}


@pytest.mark.parametrize("settings", CATERPILLARS.values(), ids=CATERPILLARS)
def test_caterpillars_take_little_longer_than_their_longest_path(settings):
    tree = tree_of_segments(caterpillar(**settings))
    runs = plan_runs(tree, 64)
    longest = int(tree.length_N.max()) / 64
    assert longest <= runs.critical_path <= 1.10 * longest


def test_heavy_side_branches_keep_any_schedule_of_the_fewest_rounds_longer():
    """Why the bound above is one of trunks with lighter branches: here the proved optimum misses it too."""
    pytest.importorskip("ortools")
    segments = caterpillar(60, range(10, 900), range(10, 900), branching=5)
    assert shortest_by_cp_sat(*runs_of(segments)) > 1.10 * int(tree_of_segments(segments).length_N.max()) / 64


def test_caterpillars_scheduled_as_early_as_possible_take_much_longer():
    """The bound above can fail."""
    tree = tree_of_segments(caterpillar(50, range(100, 1700), range(100, 3000)))
    runs = plan_runs(tree, 64)
    chunks = -(-np.diff(runs.run_offsets) // 64)
    assert critical_path(earliest_rounds(runs.run_parent), chunks) > 1.5 * runs.critical_path


LARGE = {
    "a chain": np.arange(-1, 99_999),
    "a trunk with a side run each": np.r_[-1, np.arange(49_999), np.arange(50_000)],
    "random": np.array([-1, *(random.Random(0).randrange(i) for i in range(1, 100_000))]),
    "short trunk runs between long ones": np.r_[-1, np.arange(999), np.arange(99_000) % 1000],
}


@pytest.mark.parametrize("parent", LARGE.values(), ids=LARGE.keys())
def test_a_hundred_thousand_runs_take_seconds(parent):
    chunks = np.random.default_rng(0).integers(1, 200, parent.size)
    schedule(np.array([-1, 0, -1]), np.array([1, 2, 3]))  # what is compiled on first use
    begin = time.perf_counter()
    rounds = schedule(parent, chunks)
    assert time.perf_counter() - begin < 5
    assert is_valid(parent, rounds) and rounds.max() == earliest_rounds(parent).max()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_descent_that_runs_out_of_steps_is_still_a_schedule(monkeypatch, steps):
    monkeypatch.setattr(descent, "STEPS_PER_RUN", steps)
    tree = tree_of_segments(random_segments(300, range(20, 900)))
    runs = plan_runs(tree, 64)
    chunks = -(-np.diff(runs.run_offsets) // 64)
    earliest = earliest_rounds(runs.run_parent)
    latest = latest_rounds(runs.run_parent, runs.num_rounds)
    for start in (earliest, latest):
        rounds = descent.descend(runs.run_parent, chunks, start=start, latest=latest)
        assert is_valid(runs.run_parent, rounds) and rounds.max() < runs.num_rounds
        assert critical_path(rounds, chunks) <= critical_path(start, chunks)


def test_equal_calls_give_equal_rounds():
    tree = tree_of_segments(random_segments(2000, range(20, 900)))
    one, other = plan_runs(tree, 64), plan_runs(tree, 64)
    assert one.run_round.tolist() == other.run_round.tolist()
