"""The cost model against a sum over tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.plan import CostModel
from harts.tree import build_prefix_tree, tree_from_lcp


@given(st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=8))
def test_work_of_a_tree_is_the_sum_over_its_distinct_tokens(words):
    cost = CostModel(flops_per_token=7.0, flops_per_pair=3.0)
    tree = build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))
    distinct = {word[: d + 1] for word in words for d in range(len(word))}
    assert cost.tree_work(tree) == sum(7 + 3 * len(prefix) for prefix in distinct)


def test_worked_example():
    tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])
    assert CostModel(flops_per_token=1.0, flops_per_pair=0.0).tree_work(tree) == 8
    # a1 b2 c3 d4 e5 z4 x3 y4
    assert CostModel(flops_per_token=0.0, flops_per_pair=1.0).tree_work(tree) == 26


def test_flops_of_a_model_count_forward_and_backward():
    cost = CostModel.of_model(num_parameters=100, num_attention_layers=2, num_attention_heads=3, head_dim=5)
    assert (cost.flops_per_token, cost.flops_per_pair) == (600, 360)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_numbers_are_named(value):
    with pytest.raises(ValueError, match="flops_per_pair"):
        CostModel(flops_per_token=1.0, flops_per_pair=value)
