"""Counts of a microbatch against its layout, and against sums over tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.layout.rounds import plan_runs, rounds_if_interior_states
from harts.plan.run_counts import count_rounds_e
from harts.plan.size import count_loss_edges, size_of_flat, size_of_tree
from harts.tree import PrefixTree, build_prefix_tree

words_strategy = st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=9)


def tree_of(words: list[str]) -> PrefixTree:
    return build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))


def test_worked_example():
    size = size_of_tree(build_prefix_tree(TrajectoryBatch.of(example_trajectories())), chunk_size=2, windows=(2,))
    assert (size.tokens, size.pairs, size.window_pairs) == (8, 26, 15)
    assert (size.runs, size.rounds, size.replayed) == (4, 2, 1)


@settings(deadline=None)
@given(words_strategy, st.integers(1, 5))
def test_runs_rounds_and_replayed_rows_are_those_of_the_layout(words, chunk_size):
    tree = tree_of(words)
    runs = plan_runs(tree, chunk_size)
    size = size_of_tree(tree, chunk_size=chunk_size)
    assert (size.runs, size.rounds) == (runs.run_parent.size, runs.num_rounds)
    assert size.replayed == runs.num_replayed
    rounds_e = count_rounds_e(tree.parent_S, tree.start_S, tree.end_S, chunk_size)
    assert rounds_e == rounds_if_interior_states(tree, chunk_size)


@settings(deadline=None)
@given(words_strategy, st.lists(st.integers(1, 6), max_size=3))
def test_pairs_are_a_sum_over_distinct_tokens(words, windows):
    distinct = {word[: d + 1] for word in words for d in range(len(word))}
    size = size_of_tree(tree_of(words), windows=windows)
    assert size.tokens == len(distinct)
    assert size.pairs == sum(map(len, distinct))
    assert size.window_pairs == sum(min(len(prefix), w) for prefix in distinct for w in windows)
    alone = [size_of_tree(tree_of([word]), windows=windows) for word in words]
    flat = size_of_flat(tree_of(words).length_N, windows=windows)
    assert (flat.tokens, flat.pairs, flat.window_pairs) == tuple(
        sum(getattr(s, name) for s in alone) for name in ("tokens", "pairs", "window_pairs")
    )


@settings(deadline=None)
@given(words_strategy, st.data())
def test_loss_edges_are_the_distinct_trained_tokens(words, data):
    words = sorted(words)
    tree = tree_of(words)
    spans = [
        [sorted(data.draw(st.tuples(st.integers(0, len(w)), st.integers(0, len(w))))) for _ in range(2)] for w in words
    ]
    trained = {w[: d + 1] for w, pair in zip(words, spans, strict=True) for b, e in pair for d in range(b, e)}
    assert count_loss_edges(tree.length_N.tolist(), tree.lcp_N.tolist(), spans) == len(trained)
