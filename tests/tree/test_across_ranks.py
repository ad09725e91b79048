"""The tree across ranks equals that of one process, however trajectories are dealt and whatever the hashes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.data.exchange import ThreadExchange, run_in_threads
from harts.data.trajectory import example_trajectories
from harts.tree import PrefixTree, build_prefix_tree
from harts.tree.across_ranks import SortedAcrossRanks, prefix_tree_across_ranks, sort_across_ranks
from harts.tree.block_hashes import BLOCK_TOKENS, chain_digests, cut_blocks
from harts.tree.block_trie import ListedTrajectories, match_blocks
from harts.tree.identities import TokenIdentities
from harts.tree.lcp import sort_tokens
from tests.tree import reference

Words = Sequence[NDArray[np.int64]]
Hash = Callable[[NDArray[np.uint64], NDArray[np.int64], int], NDArray[np.uint64]]
EDGES = [0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 200]
"""Depths at which paths part: beside the ends of blocks, and elsewhere."""


def identities_of(words: Words) -> TokenIdentities:
    ids = np.concatenate([*words, np.zeros(0)]).astype(np.int64)
    return TokenIdentities(token_ids_F=ids, offsets=np.cumsum([0, *(len(w) for w in words)]))


def sort_dealt(words: Words, rank_of: Sequence[int], ranks: int, chain: Hash = chain_digests) -> SortedAcrossRanks:
    """Sort with trajectory `i` on rank `rank_of[i]`; all ranks must find the same."""

    def work(exchange: ThreadExchange) -> SortedAcrossRanks:
        mine = [i for i, rank in enumerate(rank_of) if rank == exchange.rank]
        return sort_across_ranks(identities_of([words[i] for i in mine]), exchange, numbers=mine, chain=chain)

    first, *others = run_in_threads(ranks, work)
    for other in others:
        for name in ("order_N", "length_N", "lcp_N", "rank_N"):
            np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
    return first


def assert_as_in_one_process(words: Words, rank_of: Sequence[int], found: SortedAcrossRanks) -> None:
    identities = identities_of(words)
    order_N, lcp_N = sort_tokens(identities.token_ids_F, identities.offsets)
    assert found.order_N.tolist() == order_N.tolist()
    assert found.lcp_N.tolist() == lcp_N.tolist()
    assert found.length_N.tolist() == [len(words[i]) for i in order_N]
    assert found.rank_N.tolist() == [rank_of[i] for i in order_N]


def block(value: int) -> NDArray[np.int64]:
    return np.full(BLOCK_TOKENS, value)


def weakened(bits: int, tries: int = 1) -> Hash:
    """Hashes of a few bits only, for the first tries; they collide as soon as there are more blocks than that."""
    keep = np.uint64((1 << bits) - 1)

    def chain(digests: NDArray[np.uint64], parent_B: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
        hashes = chain_digests(digests, parent_B, seed)
        return hashes & keep if seed < tries else hashes

    return chain


@st.composite
def dealt_words(draw: st.DrawFn) -> tuple[Words, list[int], int]:
    """Up to 14 words of 0 to 200 tokens, most of which begin like another, on 1 to 5 ranks; some ranks get none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    words: list[NDArray[np.int64]] = [rng.integers(0, 2, 200)]
    for kind in draw(st.lists(st.sampled_from(["parts", "prefix", "duplicate", "new"]), max_size=13)):
        other = words[rng.integers(len(words))]
        depth = min(int(rng.choice(EDGES)), other.size)
        tail = rng.integers(0, 3, rng.choice([1, 5, 64, 100]))
        made: dict[str, NDArray[np.int64]] = {
            "parts": np.concatenate([other[:depth], tail])[:200],
            "prefix": other[:depth],
            "duplicate": other,
            "new": tail,
        }
        words.append(made[kind])
    ranks, words = draw(st.integers(1, 5)), words[draw(st.integers(0, 1)) :]
    return words, rng.integers(0, ranks, len(words)).tolist(), ranks


@settings(max_examples=200)
@given(dealt_words())
def test_random_words_equal_one_process(dealt):
    words, rank_of, ranks = dealt
    assert_as_in_one_process(words, rank_of, sort_dealt(words, rank_of, ranks))


def unchained(digests: NDArray[np.uint64], parent_B: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """The first try forgets what was before a block."""
    return chain_digests(digests, parent_B, seed) if seed else digests


@settings(max_examples=100)
@given(dealt_words(), st.sampled_from([weakened(0), weakened(1), weakened(3), unchained]))
def test_hashes_that_collide_change_nothing(dealt, chain):
    words, rank_of, ranks = dealt
    assert_as_in_one_process(words, rank_of, sort_dealt(words, rank_of, ranks, chain))


def test_hashes_that_forget_what_was_before_are_found_out():
    """Both ranks have the blocks 1 and 2; after one of them rank 0 goes on as rank 1 does after the other."""
    words = [np.r_[block(1), block(5), 1], block(2), block(1), np.r_[block(2), block(5), 0]]
    assert_as_in_one_process(words, [0, 0, 1, 1], sort_dealt(words, [0, 0, 1, 1], 2, unchained))


COLLISIONS: dict[str, list[Words]] = {
    "two blocks of one rank": [[block(1), block(2)], [block(3)]],
    "first blocks of two ranks": [[block(1)], [block(2)]],
    "the same block after other ones": [[np.r_[block(1), block(5)]], [np.r_[block(2), block(5)]]],
    "a holder in the middle of three": [[block(1)], [block(2)], [block(1)]],
    "the last token of a block": [[block(1)], [np.r_[block(1)[:-1], 2]]],
}


@pytest.mark.parametrize("case", COLLISIONS)
def test_collisions_are_caught_and_other_hashes_tried(case):
    parts = COLLISIONS[case]
    words = [word for part in parts for word in part]
    rank_of = [rank for rank, part in enumerate(parts) for _ in part]
    assert_as_in_one_process(words, rank_of, sort_dealt(words, rank_of, len(parts), weakened(0)))
    with pytest.raises(RuntimeError, match="hash function is broken"):
        sort_dealt(words, rank_of, len(parts), weakened(0, tries=99))


@pytest.mark.parametrize("case", ["first blocks of two ranks", "the last token of a block"])
def test_only_tokens_tell_these_collisions(case):
    """Nothing in the hashes gives them away, so the tests above hold because tokens are compared."""
    words = [part[0] for part in COLLISIONS[case]]
    listed = ListedTrajectories(
        rank_N=np.arange(2), number_N=np.arange(2), length_N=np.full(2, BLOCK_TOKENS), lcp_N=np.zeros(2, np.int64)
    )
    assert (words[0] != words[1]).any()
    trie = match_blocks(listed, np.zeros((2, 2), dtype=np.uint64))
    assert trie is not None and trie.depth_G.tolist() == [0, 1]


def test_the_same_for_any_dealing_of_the_worked_example():
    words = [t.token_ids for t in example_trajectories()]
    for rank_of in ([0, 0, 0, 0], [1, 0, 1, 0], [3, 2, 1, 0], [4, 4, 0, 4]):
        found = sort_dealt(words, rank_of, 5)
        assert (found.order_N.tolist(), found.lcp_N.tolist()) == ([3, 0, 2, 1], [0, 3, 3, 2])


def test_equal_trajectories_come_by_number():
    word, longer = np.arange(100), np.arange(150)
    found = sort_dealt([word, longer, word, longer, word], [2, 0, 1, 1, 0], 3)
    assert found.order_N.tolist() == [0, 2, 4, 1, 3]
    assert found.lcp_N.tolist() == [0, 100, 100, 100, 150]


def tree_of_dealt(trajectories: Sequence[Trajectory], rank_of: Sequence[int], ranks: int) -> PrefixTree:
    def work(exchange: ThreadExchange) -> PrefixTree:
        mine = [i for i, rank in enumerate(rank_of) if rank == exchange.rank]
        return prefix_tree_across_ranks([trajectories[i] for i in mine], exchange, numbers=mine).tree

    return run_in_threads(ranks, work)[ranks - 1]


def assert_tree_as_in_one_process(trajectories: Sequence[Trajectory], rank_of: Sequence[int], ranks: int) -> None:
    found = tree_of_dealt(trajectories, rank_of, ranks)
    alone = build_prefix_tree(TrajectoryBatch.of(trajectories))
    for name in ("order_N", "length_N", "lcp_N", "parent_S", "start_S", "end_S", "multiplicity_S", "tail_N"):
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name), err_msg=name)


@settings(max_examples=60)
@given(
    dealt_words(),
    st.sampled_from(["share keys", "some share keys", "routes", "routes of odd size", "routes and some share keys"]),
    st.integers(0, 99),
)
def test_share_keys_and_routes_are_part_of_a_token(dealt, kind, seed):
    words, rank_of, ranks = dealt
    rng = np.random.default_rng(seed)
    words = [word if word.size else np.array([1]) for word in words] or [np.array([1])]
    rank_of = rank_of or [0]
    trajectories = []
    for word in words:
        made = Trajectory.of(word)
        if "share keys" in kind and (kind == "share keys" or rng.random() < 0.5):
            # Few tokens differ, so that paths part at keys too; large and negative ones must keep their order.
            made = replace(made, share_key=rng.choice([0, -1, 2**40], word.size, p=[0.99, 0.005, 0.005]))
        if "routes" in kind:
            experts = 3 if "odd" in kind else 2
            # Bytes, not numbers, give the order: 256 is before 1, and -1 after all.
            first = np.where(rng.random(word.size) < 0.99, 1, 256)[:, None, None]
            routes = np.concatenate([first, *(first + e for e in range(1, experts))], axis=2)
            routes[rng.random(word.size) < 0.005] = -1
            made = replace(made, routes=routes.astype(np.int32))
        trajectories.append(made)
    assert_tree_as_in_one_process(trajectories, rank_of, ranks)


def test_a_share_key_on_one_rank_only_parts_its_trajectory():
    trajectories = [Trajectory.of(range(100)), Trajectory.of(range(100), share_key=[0] * 70 + [7] * 30)]
    found = tree_of_dealt(trajectories, [1, 0], 2)
    assert (found.order_N.tolist(), found.lcp_N.tolist()) == ([0, 1], [0, 70])


def test_ids_beyond_32_bits_keep_their_order():
    words = [np.array([2**40, 1]), np.array([3, 1]), np.array([2**40, 0])]
    assert_as_in_one_process(words, [0, 1, 1], sort_dealt(words, [0, 1, 1], 2))


def test_each_rank_gets_hashes_and_what_others_hold_too_once():
    """Sixteen of a prompt of 100 blocks on four ranks: no rank gets the prompt more than once."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 100 * BLOCK_TOKENS)
    words = [np.r_[prompt, rng.integers(0, 1000, 30 * BLOCK_TOKENS + 5)] for _ in range(16)]

    def work(exchange: ThreadExchange) -> tuple[int, int]:
        mine = list(range(exchange.rank, 16, 4))
        sort_across_ranks(identities_of([words[i] for i in mine]), exchange, numbers=mine)
        return exchange.bytes_received, exchange.num_calls

    for rank, (received, calls) in enumerate(run_in_threads(4, work)):
        hashes = 3 * (100 + 4 * 30) * 16
        prompt_once = 4 * prompt.size if rank > 0 else 0  # the first holder reads nobody's
        sorted_here = 4 * 12 * BLOCK_TOKENS if rank == 0 else 0  # one rank sorts what follows the prompt
        lists = 3 * (4 * 3 * 8 + 8 * 8) + 4 * (3 + (2 * 16 if rank != 0 else 0))
        assert received == hashes + prompt_once + sorted_here + lists
        assert calls == 5


def test_what_the_sorting_rank_has_itself_does_not_travel():
    """Rank 1 sorts four first blocks. Rank 0 sends the one that it lacks, and the one that both have, to compare."""
    parts = [[block(1), block(2)], [block(1), block(3), block(4)]]

    def work(exchange: ThreadExchange) -> int:
        sort_across_ranks(identities_of(parts[exchange.rank]), exchange)
        return exchange.bytes_received

    lists = [8 * 8 + 24 * n + 16 * n + 4 for n in (3, 2)]
    first_blocks, tails = 8 * 4, 8 * 2  # sorted by rank 1, and by rank 0 after the block that both have
    shown = 2 * 4 * BLOCK_TOKENS
    assert run_in_threads(2, work) == [lists[0] + first_blocks, lists[1] + tails + shown]


@pytest.mark.parametrize(
    ("numbers", "message"), [([[0], [0, 1]], "0 stands where 1"), ([[0], [1, 3]], "3 stands where 2")]
)
def test_wrong_numbers_are_named_on_every_rank(numbers, message):
    seen = []

    def work(exchange: ThreadExchange) -> None:
        mine = numbers[exchange.rank]
        with pytest.raises(ValueError, match=message):
            prefix_tree_across_ranks([Trajectory.of([1])] * len(mine), exchange, numbers=mine)
        seen.append(exchange.rank)

    run_in_threads(2, work)
    assert sorted(seen) == [0, 1]


def test_without_numbers_ranks_are_counted_one_after_the_other():
    parts = [[Trajectory.of([2]), Trajectory.of([1])], [], [Trajectory.of([1, 0])]]
    trees = run_in_threads(3, lambda exchange: prefix_tree_across_ranks(parts[exchange.rank], exchange))
    assert [t.tree.order_N.tolist() for t in trees] == [[1, 2, 0]] * 3
    assert trees[1].rank_N.tolist() == [0, 0, 2]
    assert trees[1].length_N.tolist() == [1, 1, 2]
    assert [t.numbers.tolist() for t in trees] == [[0, 1], [], [2]]


def test_what_ranks_cannot_agree_on_is_named():
    routed = Trajectory.of([1, 2], routes=np.zeros((2, 3, 1)))
    parts = [[routed], [], [Trajectory.of([1, 2])]]
    with pytest.raises(ValueError, match=r"\[3, 1\] layers and experts on rank 0, but \[-1, -1\] on rank 2"):
        run_in_threads(3, lambda exchange: prefix_tree_across_ranks(parts[exchange.rank], exchange))
    with pytest.raises(ValueError, match="No rank has a trajectory"):
        run_in_threads(2, lambda exchange: prefix_tree_across_ranks([], exchange))


def refuse_nines(batch: TrajectoryBatch) -> None:
    if (batch.token_ids_F == 9).any():
        raise ValueError("a nine")


@pytest.mark.parametrize(
    ("wrong", "numbers", "message"),
    [
        ([1, -2], [1], "Trajectory 0 has the negative token id -2"),
        ([1, 9], [1], "a nine"),
        ([1, 2], [1, 2], "2 numbers for 1 trajectories"),
    ],
)
def test_all_ranks_raise_what_one_finds_wrong(wrong, numbers, message):
    """The rank that finds it says what, the others which rank; all after one exchange."""
    parts = [([Trajectory.of([1])], [0]), ([Trajectory.of(wrong)], numbers), ([], [])]

    def work(exchange: ThreadExchange) -> tuple[str, int]:
        own, numbers = parts[exchange.rank]
        with pytest.raises(ValueError) as caught:
            prefix_tree_across_ranks(own, exchange, numbers=numbers, check=refuse_nines)
        return str(caught.value), exchange.num_calls

    said = run_in_threads(3, work)
    assert message in said[1][0]
    assert all("Ranks [1] found" in text for text, _ in (said[0], said[2]))
    assert [calls for _, calls in said] == [1, 1, 1]


def test_blocks_are_cut_where_a_list_does_not_repeat_them():
    length_N, lcp_N = np.array([150, 200, 64, 10]), np.array([0, 130, 64, 0])
    entry_B, depth_B, parent_B, tail_N = (a.tolist() for a in cut_blocks(length_N, lcp_N))
    assert (entry_B, depth_B, parent_B) == ([0, 0, 1], [0, 1, 2], [-1, 0, 1])
    assert tail_N == [1, 2, 0, -1]


def test_reference_agrees_on_common_prefixes():
    """The comparison above rests on `sort_tokens`; this one on Python's."""
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 2, n) for n in (0, 3, 64, 64, 70, 128, 200)] * 2
    rank_of = [i % 3 for i in range(len(words))]
    found = sort_dealt(words, rank_of, 3)
    order, lcp = reference.sort_with_lcp([tuple(w.tolist()) for w in words])
    assert (found.order_N.tolist(), found.lcp_N.tolist()) == (order, lcp)
