"""Runs and rounds against the definitions, on named shapes and random words."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.layout.rounds import RunPlan, plan_runs, rounds_if_interior_states
from harts.tree import tree_from_lcp
from tests.layout.brute_force import fewest
from tests.layout.building import prefixes_of, random_segments, random_words, small_trie, tree_of, tree_of_segments

EXAMPLE = ["abcde", "abxy", "abcz", "abc"]  # packed: a b c d e z x y
words_strategy = st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=10)
FIELDS = ("token_R", "owner_T", "run_offsets", "run_parent", "run_round")


def spell(runs: RunPlan, words: list[str]) -> list[tuple[str, int, int]]:
    """Text, parent and round of each run."""
    prefixes = prefixes_of(words)
    text = "".join(prefixes[t][-1] for t in runs.token_R)
    bounds = runs.run_offsets.tolist()
    return [
        (text[begin:end], int(parent), int(round_))
        for begin, end, parent, round_ in zip(bounds, bounds[1:], runs.run_parent, runs.run_round, strict=False)
    ]


def count_by_definition(words: list[str], chunk_size: int) -> tuple[int, int, int]:
    """Rounds, runs and replayed rows that no schedule can undercut, from cells and branch points of the token trie."""
    prefixes = prefixes_of(words)
    children = Counter(p[:-1] for p in prefixes if len(p) > 1)
    leaves = [p for p in prefixes if children[p] == 0]
    cuts = []
    for boundary in prefixes:
        if len(boundary) % chunk_size == 0:
            below = [p for p in prefixes if p.startswith(boundary) and 0 < len(p) - len(boundary) <= chunk_size]
            cell_leaves = [p for p in below if len(p) - len(boundary) == chunk_size or children[p] == 0]
            if len(cell_leaves) > 1:
                cuts.append(boundary)
    rounds = 1 + max(sum(leaf.startswith(cut) for cut in cuts) for leaf in leaves)
    replayed = sum((n - 1) * (len(p) % chunk_size) for p, n in children.items() if n > 1)
    return rounds, len(leaves) + len(cuts), replayed


def check_invariants(words: list[str], runs: RunPlan, *, replay: bool = True) -> None:
    prefixes = prefixes_of(words)
    C = runs.chunk_size
    bounds = runs.run_offsets.tolist()
    assert bounds[0] == 0 and bounds[-1] == runs.token_R.size
    assert runs.token_R[runs.owner_T].tolist() == list(range(len(prefixes)))
    assert len(set(runs.owner_T.tolist())) == len(prefixes)
    assert (np.diff(runs.run_round) >= 0).all()
    assert sorted(set(runs.run_round.tolist())) == list(range(runs.num_rounds))
    owners = set(runs.owner_T.tolist())
    for r, (begin, end) in enumerate(pairwise(bounds)):
        rows = [prefixes[t] for t in runs.token_R[begin:end]]
        assert all(after[:-1] == before for before, after in pairwise(rows))
        owned = [row in owners for row in range(begin, end)]
        assert any(owned) and owned == sorted(owned), "replayed rows come first and are not all"
        assert owned.index(True) < C if replay else all(owned)
        start = rows[0][:-1]
        if replay:
            assert len(start) % C == 0
        parent = int(runs.run_parent[r])
        assert (parent == -1) == (start == "")
        if parent >= 0:
            assert prefixes[runs.token_R[bounds[parent + 1] - 1]] == start
            assert runs.run_round[parent] < runs.run_round[r]


NAMED = {
    "branch exactly on a boundary": (2, EXAMPLE, [("ab", -1, 0), ("cde", 0, 1), ("cz", 0, 1), ("xy", 0, 1)]),
    "branches before the first boundary need no state": (
        4,
        EXAMPLE,
        [("abcde", -1, 0), ("abcz", -1, 0), ("abxy", -1, 0)],
    ),
    "chunks of one token; xy waits for de, which is as long": (
        1,
        EXAMPLE,
        [("ab", -1, 0), ("c", 0, 1), ("de", 1, 2), ("z", 1, 2), ("xy", 0, 2)],
    ),
    "branches in one chunk share one cut": (
        4,
        ["abcdefgh", "abcdefy", "abcdex"],
        [("abcd", -1, 0), ("efgh", 0, 1), ("efy", 0, 1), ("ex", 0, 1)],
    ),
    "cut on the edge of a chunk before the branch": (
        2,
        ["abcdefgh", "abcdexy"],
        [("abcd", -1, 0), ("efgh", 0, 1), ("exy", 0, 1)],
    ),
    "a branch off a branch in the same chunk": (
        4,
        ["abcdefgh", "abcdxyz", "abcdxw"],
        [("abcd", -1, 0), ("efgh", 0, 1), ("xyz", 0, 1), ("xw", 0, 1)],
    ),
    "the longest child owns the shared rows": (3, ["abcdx", "abcdyyy"], [("abc", -1, 0), ("dyyy", 0, 1), ("dx", 0, 1)]),
    "depth 3, a cut each": (
        2,
        ["aaaaaa", "aaaaab", "aaab", "ab"],
        [("aa", -1, 0), ("ab", -1, 0), ("aa", 0, 1), ("ab", 0, 1), ("aa", 2, 2), ("ab", 2, 2)],
    ),
    "a trajectory that ends inside another cuts nothing": (2, ["abcdef", "abc", "abcd"], [("abcdef", -1, 0)]),
    "forest": (2, ["abc", "xyz", "xyw"], [("abc", -1, 0), ("xy", -1, 0), ("w", 1, 1), ("z", 1, 1)]),
}


@pytest.mark.parametrize(("chunk_size", "words", "expected"), NAMED.values(), ids=NAMED.keys())
def test_named_runs(chunk_size, words, expected):
    runs = plan_runs(tree_of(words), chunk_size)
    assert spell(runs, words) == expected
    check_invariants(words, runs)


def test_worked_example_is_the_one_of_the_docstring():
    runs = plan_runs(tree_of(EXAMPLE), 2)
    assert runs.token_R.tolist() == [0, 1, 2, 3, 4, 2, 5, 6, 7]
    assert runs.owner_T.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    assert runs.run_offsets.tolist() == [0, 2, 5, 7, 9]
    assert runs.run_parent.tolist() == [-1, 0, 0, 0]
    assert runs.run_round.tolist() == [0, 1, 1, 1]
    assert (runs.num_rounds, runs.num_replayed, runs.critical_path) == (2, 1, 3)
    assert all(getattr(runs, name).dtype == np.int64 for name in FIELDS)


def count_with_interior_states(words: list[str], chunk_size: int) -> int:
    """Rounds by the definition: Horton-Strahler numbers over the boundaries of the token trie."""
    prefixes = prefixes_of(words)
    leaves = {p for p in prefixes if not any(q != p and q.startswith(p) for q in prefixes)}

    def next_below(boundary: str) -> list[str]:
        below = [p for p in prefixes if p.startswith(boundary) and 0 < len(p) - len(boundary) <= chunk_size]
        return [p for p in below if len(p) - len(boundary) == chunk_size or p in leaves]

    def number(place: str) -> int:
        if place in leaves:
            return 1
        first, *others = sorted((number(p) for p in next_below(place)), reverse=True)
        return max(first, others[0] + 1) if others else first

    return max(number(place) for place in next_below(""))


def check_minimal(words: list[str], chunk_size: int) -> None:
    runs = plan_runs(tree_of(words), chunk_size)
    check_invariants(words, runs)
    assert (runs.num_rounds, runs.run_parent.size, runs.num_replayed) == count_by_definition(words, chunk_size)


@pytest.mark.parametrize("seed", range(10))
def test_rounds_runs_and_replay_are_the_fewest(seed):
    rng = random.Random(seed)
    for _ in range(30):
        check_minimal(random_words(rng), rng.randint(2, 4))


def test_rounds_runs_and_replay_equal_brute_force():
    """2,000 small tries, chunks of 2 to 4 tokens, up to 5 rounds."""
    rng = random.Random(0)
    seen = Counter()
    for _ in range(2000):
        words, chunk_size = small_trie(rng), rng.choice([2, 2, 2, 3, 3, 4])
        tree = tree_of(words)
        runs = plan_runs(tree, chunk_size)
        counts = (runs.num_rounds, runs.run_parent.size, runs.num_replayed)
        assert counts == fewest(words, chunk_size, interior_states=False), (words, chunk_size)
        rounds, leaves = rounds_if_interior_states(tree, chunk_size), int((tree.num_children_S == 0).sum())
        counts = (rounds, leaves, runs.num_replayed)
        assert counts == fewest(words, chunk_size, interior_states=True), (words, chunk_size)
        seen[runs.num_rounds, rounds] += 1
    assert {(1, 1), (2, 2), (3, 2), (3, 3), (4, 2), (4, 3)} <= seen.keys(), "the tries are too simple"


def test_rounds_runs_and_replay_are_the_fewest_on_many_trees():
    rng = random.Random(12345)
    for _ in range(5000):
        check_minimal(random_words(rng), rng.randint(1, 6))


@given(words_strategy, st.integers(1, 5))
def test_interior_states_save_rounds(words, chunk_size):
    tree = tree_of(words)
    rounds = rounds_if_interior_states(tree, chunk_size)
    assert rounds == count_with_interior_states(words, chunk_size)
    leaves = int((tree.num_children_S == 0).sum())
    assert 1 <= rounds <= min(plan_runs(tree, chunk_size).num_rounds, 1 + int(np.log2(leaves)))


def test_a_binary_tree_needs_a_round_a_level_with_interior_states_too():
    segments = [(-1, 10)] + [((i - 1) // 2, 10) for i in range(1, 31)]  # 5 levels; a boundary in each segment
    tree = tree_of_segments(segments)
    assert (plan_runs(tree, 10).num_rounds, rounds_if_interior_states(tree, 10)) == (5, 5)
    assert (plan_runs(tree, 60).num_rounds, rounds_if_interior_states(tree, 60)) == (1, 1)


@given(words_strategy, st.integers(1, 5))
def test_invariants_hold_with_and_without_replay(words, chunk_size):
    tree = tree_of(words)
    check_invariants(words, plan_runs(tree, chunk_size))
    check_invariants(words, plan_runs(tree, chunk_size, replay=False), replay=False)


@given(words_strategy)
def test_chunks_of_one_token_replay_nothing(words):
    assert plan_runs(tree_of(words), 1).num_replayed == 0


@given(words_strategy)
def test_chunks_longer_than_every_trajectory_need_one_round(words):
    runs = plan_runs(tree_of(words), max(map(len, words)) + 1)
    assert runs.num_rounds == 1
    assert (runs.run_parent == -1).all()


@given(words_strategy, st.integers(1, 4), st.booleans(), st.data())
def test_duplicates_prefixes_and_order_change_nothing(words, chunk_size, replay, data):
    extra = [data.draw(st.sampled_from(words)) for _ in range(3)]
    extra = [word[: data.draw(st.integers(1, len(word)))] for word in extra]
    more = data.draw(st.permutations(words + extra))
    one = plan_runs(tree_of(words), chunk_size, replay=replay)
    other = plan_runs(tree_of(more), chunk_size, replay=replay)
    for name in FIELDS:
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    assert rounds_if_interior_states(tree_of(words), chunk_size) == rounds_if_interior_states(tree_of(more), chunk_size)


@given(words_strategy, st.integers(1, 4))
def test_order_of_children_changes_no_count(words, chunk_size):
    mirrored = [word.translate(str.maketrans("abc", "cba")) for word in words]
    one, other = plan_runs(tree_of(words), chunk_size), plan_runs(tree_of(mirrored), chunk_size)
    assert np.bincount(one.run_round).tolist() == np.bincount(other.run_round).tolist()
    assert (one.num_replayed, one.critical_path) == (other.num_replayed, other.critical_path)


def test_without_replay_every_branch_starts_new_chunks():
    runs = plan_runs(tree_of(EXAMPLE), 4, replay=False)
    assert spell(runs, EXAMPLE) == [("ab", -1, 0), ("c", 0, 1), ("xy", 0, 1), ("de", 1, 2), ("z", 1, 2)]
    assert runs.num_replayed == 0


@pytest.mark.parametrize("kind", ["every prefix a trajectory", "a side branch at every token"])
def test_chain_of_a_hundred_thousand_segments_is_fast(kind):
    n = 100_000 if kind == "every prefix a trajectory" else 50_000
    depth = np.arange(1, n + 1)
    if kind == "every prefix a trajectory":
        tree = tree_from_lcp(np.arange(n), depth, depth - 1)
        rounds, replayed = 1, 0
    else:  # a trunk and one side token after each of its tokens but the last
        tree = tree_from_lcp(np.arange(n), np.r_[n, depth[:0:-1]], np.r_[0, depth[-2::-1]])
        # One cut a full chunk, unless the trunk ends with it; each side branch replays back to its boundary.
        rounds, replayed = (n - 1) // 64 + 1, int((depth[:-1] % 64).sum())
    assert tree.parent_S.size >= 99_999
    begin = time.perf_counter()
    runs = plan_runs(tree, 64)
    assert time.perf_counter() - begin < 10
    assert (runs.num_rounds, runs.num_replayed) == (rounds, replayed)
    begin = time.perf_counter()
    assert rounds_if_interior_states(tree, 64) == min(rounds, 2)
    assert time.perf_counter() - begin < 2


def test_a_hundred_thousand_runs_are_planned_in_seconds():
    tree = tree_of_segments(random_segments(130_000, range(5, 100)))
    plan_runs(tree_of_segments(random_segments(100, range(5, 100))), 16)  # what is compiled on first use
    begin = time.perf_counter()
    runs = plan_runs(tree, 16)
    assert time.perf_counter() - begin < 10
    assert runs.run_parent.size > 90_000


@pytest.mark.parametrize("chunk_size", [0, -64])
def test_chunk_size_must_be_positive(chunk_size):
    for function in (plan_runs, rounds_if_interior_states):
        with pytest.raises(ValueError, match=f"chunk_size {chunk_size}"):
            function(tree_of(EXAMPLE), chunk_size)
