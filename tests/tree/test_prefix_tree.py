"""Trees against a dictionary trie, on named shapes and random words."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.tree import PrefixTree, build_prefix_tree, tree_from_lcp
from harts.tree.lcp import sort_tokens
from tests.tree import reference

words_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=12)

NAMED = {
    "one token": ["a"],
    "one trajectory": ["abc"],
    "no common token": ["abc", "b", "ca"],
    "only duplicates": ["ab", "ab", "ab"],
    "chain of prefixes": ["a", "abcd", "ab", "abc"],
    "prefix with duplicates on both sides": ["ab", "abc", "ab", "abc", "abd"],
    "branch after the first token": ["ab", "ac", "ad"],
    "depth 4": ["aaaa", "aaab", "aab", "ab", "b"],
    "branch inside a side branch": ["abcd", "axyz", "axyw", "axq", "abce"],
    "forest with deep trees": ["abc", "abd", "xbc", "xbd", "xb"],
}


def batch_of(words, share_keys=None):
    keys = share_keys or [None] * len(words)
    ids = [[ord(c) for c in word] if isinstance(word, str) else word for word in words]
    return TrajectoryBatch.of([Trajectory.of(w, share_key=k) for w, k in zip(ids, keys, strict=True)])


def packed_paths(tree: PrefixTree) -> list[list[int]]:
    """Packed tokens of every trajectory, in tree order, by walking up from its tail."""
    paths = []
    for tail in tree.tail_N:
        path: list[int] = []
        segment = int(tail)
        while segment >= 0:
            size = tree.end_S[segment] - tree.start_S[segment]
            path = list(range(tree.offset_S[segment], tree.offset_S[segment] + size)) + path
            segment = int(tree.parent_S[segment])
        paths.append(path)
    return paths


def check_against_trie(words: list[tuple], tree: PrefixTree) -> None:
    order = sorted(range(len(words)), key=lambda i: (words[i], i))
    assert tree.order_N.tolist() == order
    assert tree.length_N.tolist() == [len(words[i]) for i in order]
    count = Counter(word[: d + 1] for word in words for d in range(len(word)))
    packed = {prefix: i for i, prefix in enumerate(sorted(count))}  # pre-order of a trie is the order of its prefixes
    assert tree.num_tokens == len(count)
    assert tree.num_trajectory_tokens == sum(map(len, words))
    paths = packed_paths(tree)
    assert paths == [[packed[words[i][: d + 1]] for d in range(len(words[i]))] for i in order]
    for i in range(1, len(order)):
        a, b = words[order[i - 1]], words[order[i]]
        common = next((d for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert tree.lcp_N[i] == common

    # A segment ends exactly after tokens where paths part or a trajectory ends.
    children = Counter(prefix[:-1] for prefix in count if len(prefix) > 1)
    ends = sorted(prefix for prefix in count if children[prefix] != 1 or prefix in set(words))
    depth = [len(prefix) for prefix in sorted(count)]
    last_S = tree.offset_S + tree.end_S - tree.start_S - 1
    assert last_S.tolist() == [packed[prefix] for prefix in ends]
    assert tree.multiplicity_S.tolist() == [count[prefix] for prefix in ends]
    assert [depth[i] for i in last_S] == tree.end_S.tolist()
    assert [depth[i] for i in tree.offset_S] == (tree.start_S + 1).tolist()
    assert (tree.parent_S < np.arange(tree.parent_S.size)).all()
    assert tree.num_children_S.tolist() == [children[prefix] for prefix in ends]


def test_worked_example_is_the_one_of_the_docstring():
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    expected = {
        "order_N": [3, 0, 2, 1],
        "length_N": [3, 5, 4, 4],
        "lcp_N": [0, 3, 3, 2],
        "parent_S": [-1, 0, 1, 1, 0],
        "start_S": [0, 2, 3, 3, 2],
        "end_S": [2, 3, 5, 4, 4],
        "offset_S": [0, 2, 3, 5, 6],
        "multiplicity_S": [4, 3, 1, 1, 1],
        "tail_N": [1, 2, 3, 4],
    }
    assert {name: getattr(tree, name).tolist() for name in expected} == expected
    assert all(getattr(tree, name).dtype == np.int64 for name in expected)
    assert (tree.num_tokens, tree.num_trajectory_tokens) == (8, 16)


@pytest.mark.parametrize("words", NAMED.values(), ids=NAMED.keys())
def test_named_trees_equal_a_dictionary_trie(words):
    check_against_trie([tuple(map(ord, w)) for w in words], build_prefix_tree(batch_of(words)))


@given(words_strategy)
def test_random_trees_equal_a_dictionary_trie(words):
    check_against_trie([tuple(w) for w in words], build_prefix_tree(batch_of(words)))


@given(words_strategy, st.data())
def test_share_keys_are_part_of_a_token(words, data):
    keys = [data.draw(st.lists(st.integers(-1, 1), min_size=len(w), max_size=len(w))) for w in words]
    pairs = [tuple(zip(w, k, strict=True)) for w, k in zip(words, keys, strict=True)]
    check_against_trie(pairs, build_prefix_tree(batch_of(words, keys)))


def test_a_different_share_key_forks_exactly_at_its_token():
    words = ["abcd", "abcd", "abcd"]
    tree = build_prefix_tree(batch_of(words, [[0, 0, 0, 0], [0, 0, 7, 0], None]))
    assert tree.order_N.tolist() == [0, 2, 1]
    assert tree.lcp_N.tolist() == [0, 4, 2]
    assert tree.num_tokens == 6


def test_ids_beyond_32_bits_keep_their_order():
    tree = build_prefix_tree(batch_of([[2**40, 1], [3, 1], [2**40, 0]]))
    assert tree.order_N.tolist() == [1, 2, 0]
    assert tree.lcp_N.tolist() == [0, 0, 1]


@given(words_strategy, st.data())
def test_restriction_equals_building_the_subset(words, data):
    subset = data.draw(st.lists(st.sampled_from(range(len(words))), min_size=1, unique=True))
    restricted = build_prefix_tree(batch_of(words)).restrict(subset)
    numbers = sorted(subset)
    alone = build_prefix_tree(batch_of([words[i] for i in numbers]))
    for name in ("length_N", "lcp_N", "parent_S", "start_S", "end_S", "offset_S", "multiplicity_S", "tail_N"):
        assert getattr(restricted, name).tolist() == getattr(alone, name).tolist(), name
    assert restricted.order_N.tolist() == [numbers[i] for i in alone.order_N]


def test_restriction_can_be_repeated():
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    assert tree.restrict([3, 2, 1]).restrict([1, 2]).order_N.tolist() == [2, 1]


@pytest.mark.parametrize(("wanted", "message"), [([], "at least one"), ([0, 0], r"\[0\]"), ([0, 9], r"\[9\]")])
def test_restriction_names_what_is_wrong(wanted, message):
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    with pytest.raises(ValueError, match=message):
        tree.restrict(wanted)


@pytest.mark.parametrize(
    ("length", "lcp", "message"),
    [
        ([], [], "at least one trajectory"),
        ([2, 3], [0], "shapes"),
        ([2, 0], [0, 0], "Length 0"),
        ([2, 3], [1, 2], r"lcp\[0\] is 1"),
        ([2, 3], [0, 3], r"lcp\[1\] is 3 .* 0 to 2"),
        ([3, 3], [0, -1], r"lcp\[1\] is -1"),
        ([3, 2], [0, 2], "a prefix before"),
    ],
)
def test_shapes_that_no_sorted_list_has_are_refused(length, lcp, message):
    with pytest.raises(ValueError, match=message):
        tree_from_lcp(range(len(length)), length, lcp)


@pytest.mark.parametrize("kind", ["every prefix a trajectory", "a side branch at every token"])
def test_chain_of_a_hundred_thousand_segments_is_fast(kind):
    n = 100_000
    depth = np.arange(1, n + 1)
    if kind == "every prefix a trajectory":
        length, lcp, segments = depth, depth - 1, n
    else:  # trunk first, then one side token at each depth from the bottom up
        length, lcp, segments = np.r_[n, depth[::-1]], np.r_[0, depth[::-1] - 1], 2 * n
    begin = time.perf_counter()
    tree = tree_from_lcp(np.arange(length.size), length, lcp)
    assert time.perf_counter() - begin < 3
    assert tree.parent_S.size == segments
    assert tree.multiplicity_S[0] == n
    assert tree.num_tokens == length.sum() - lcp.sum()


@settings(max_examples=20)
@given(words_strategy, st.randoms(use_true_random=False))
def test_permuting_the_batch_changes_the_order_only(words, random):
    shuffled = list(words)
    random.shuffle(shuffled)
    one, other = build_prefix_tree(batch_of(words)), build_prefix_tree(batch_of(shuffled))
    for name in ("length_N", "lcp_N", "parent_S", "start_S", "end_S", "offset_S", "multiplicity_S", "tail_N"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


@given(words_strategy, st.booleans())
def test_compiled_sort_and_segments_equal_the_reference(words, narrow):
    offsets = np.concatenate([[0], np.cumsum([len(w) for w in words])])
    tokens_F = np.concatenate(words).astype(np.int32 if narrow else np.int64)
    order_N, lcp_N = sort_tokens(tokens_F, offsets)
    assert (order_N.tolist(), lcp_N.tolist()) == reference.sort_with_lcp([tuple(w) for w in words])
    tree = tree_from_lcp(order_N, np.diff(offsets)[order_N], lcp_N)
    expected = reference.segments(tree.length_N, lcp_N)
    assert {name: getattr(tree, name).tolist() for name in expected} == expected


LONG = {
    "all equal": lambda rng: [np.ones(100, np.int64)] * 50,
    "every prefix of one": lambda rng: [np.arange(n) for n in rng.permutation(np.arange(1, 200))],
    "a thousand children": lambda rng: [np.r_[np.arange(70), i, np.arange(5)] for i in rng.permutation(1000)],
    "differences beside a block of 32": lambda rng: [
        np.r_[np.zeros(n, np.int64), v, np.arange(40)] for n in (31, 32, 33, 63, 64, 65) for v in (1, 2)
    ],
    "long and random": lambda rng: [rng.integers(0, 2, rng.integers(1, 300)) for _ in range(300)],
}


@pytest.mark.parametrize("case", LONG)
def test_sets_that_break_careless_sorts_equal_the_reference(case):
    words = LONG[case](np.random.default_rng(0))
    order_N, lcp_N = sort_tokens(np.concatenate(words), np.concatenate([[0], np.cumsum([w.size for w in words])]))
    assert (order_N.tolist(), lcp_N.tolist()) == reference.sort_with_lcp([tuple(w.tolist()) for w in words])


def test_an_empty_slice_is_a_prefix_of_all():
    order_N, lcp_N = sort_tokens(np.array([1, 1]), np.array([0, 1, 1, 2]))
    assert (order_N.tolist(), lcp_N.tolist()) == ([1, 0, 2], [0, 0, 1])


def test_a_constant_key_is_no_key():
    tokens_F, offsets = np.array([2, 1, 2, 2]), np.array([0, 2, 4])
    with_key = sort_tokens(tokens_F, offsets, share_key_F=np.full(4, 9))
    assert [a.tolist() for a in with_key] == [a.tolist() for a in sort_tokens(tokens_F, offsets)]


def test_importing_the_package_does_not_import_numba():
    code = "import sys, harts; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(words=words_strategy)
@example(words=NAMED["prefix with duplicates on both sides"])
@example(words=NAMED["forest with deep trees"])
def test_largest_first(words):
    """The same trajectories and segments; siblings fall in size, and lcps are those of the words."""
    tree = build_prefix_tree(batch_of(words))
    ordered = tree.largest_first()
    assert sorted(ordered.order_N.tolist()) == sorted(tree.order_N.tolist())
    spelled = [words[i] for i in ordered.order_N]
    for lcp, (one, other) in zip(ordered.lcp_N[1:], pairwise(spelled), strict=True):
        assert one[:lcp] == other[:lcp]
        assert one[lcp : lcp + 1] != other[lcp : lcp + 1] or (one == other and lcp == len(one))
    for field in ("start_S", "end_S", "multiplicity_S"):
        assert sorted(getattr(ordered, field).tolist()) == sorted(getattr(tree, field).tolist())
    sizes = ordered.end_S - ordered.start_S
    for segment in range(sizes.size - 1, -1, -1):
        if ordered.parent_S[segment] >= 0:
            sizes[ordered.parent_S[segment]] += sizes[segment]
    for parent in set(ordered.parent_S.tolist()):
        siblings = sizes[ordered.parent_S == parent]
        assert (np.diff(siblings) <= 0).all()
