"""Trees of groups, and which of their tokens are trained, against sets of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import RolloutGroup, Trajectory
from harts.data.readers import GroupShape
from harts.data.trajectory import example_trajectories
from harts.inspect.groups import GroupTree, group_tree

words_strategy = st.lists(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=8
)


def group_of(words: list[list[tuple[str, bool]]]) -> RolloutGroup:
    trajectories = [
        Trajectory.of([ord(c) for c, _ in word], loss_mask=[i > 0 and trained for i, (_, trained) in enumerate(word)])
        for word in words
    ]
    return RolloutGroup(name="words", trajectories=tuple(trajectories))


def shape_of(found: GroupTree) -> GroupShape:
    """The same group as shapes files describe it."""
    tree = found.tree
    spans = []
    for number in tree.order_N:
        mask = found.trajectories[number].loss_mask
        edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        spans.append(tuple((int(begin), int(end)) for begin, end in edges))
    return GroupShape(name="words", length_N=tree.length_N, lcp_N=tree.lcp_N, loss_spans=tuple(spans))


def test_worked_example():
    found = group_tree(RolloutGroup(name="letters", trajectories=tuple(example_trajectories())))
    assert (found.tree.num_trajectory_tokens, found.tree.num_tokens, found.trained_tokens) == (16, 8, 12)
    assert found.trained_S.tolist() == [1, 1, 2, 1, 2]  # ab c de z xy; the first token has no predictor


@settings(deadline=None)
@given(words_strategy)
def test_trained_tokens_of_segments_are_those_that_any_trajectory_trains(words):
    found = group_tree(group_of(words))
    texts = ["".join(c for c, _ in word) for word in words]
    trained = {
        text[: i + 1] for text, word in zip(texts, words, strict=True) for i in range(1, len(word)) if word[i][1]
    }
    tree = found.tree
    for segment, count in enumerate(found.trained_S):
        text = texts[tree.order_N[np.searchsorted(tree.tail_N, segment)]]
        inside = range(tree.start_S[segment], tree.end_S[segment])
        assert count == sum(text[: depth + 1] in trained for depth in inside)
    assert found.trained_tokens == sum(t for word in words for _, t in word[1:])
    from_shape = group_tree(shape_of(found))
    assert from_shape.trained_S.tolist() == found.trained_S.tolist()
    assert from_shape.trained_tokens == found.trained_tokens


def test_spans_that_overlap_or_are_out_of_order_count_once():
    shape = GroupShape(
        name="",
        length_N=np.array([9, 9]),
        lcp_N=np.array([0, 6]),
        loss_spans=(((4, 9), (1, 5)), ((1, 9), (2, 3))),
    )
    assert group_tree(shape).trained_S.tolist() == [5, 3, 3]


def test_share_keys_keep_tokens_apart():
    same = [Trajectory.of([1, 2, 3]), Trajectory.of([1, 2, 3], share_key=[0, 7, 7])]
    assert group_tree(RolloutGroup(name="", trajectories=tuple(same))).tree.num_tokens == 5


def test_ids_of_more_than_31_bits_are_told_apart():
    ids = [[1, 2**40], [1, 2**40 + 2**33]]
    group = RolloutGroup(name="", trajectories=tuple(Trajectory.of(i) for i in ids))
    assert group_tree(group).tree.num_tokens == 3


def test_an_empty_trajectory_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        group_tree(RolloutGroup(name="", trajectories=(Trajectory.of([1]), Trajectory.of([]))))
