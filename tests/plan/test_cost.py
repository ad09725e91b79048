"""The cost model against a sum over tokens."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.plan import CostModel
from harts.plan.cost import CostParameters, ModelDimensions, microbatch_memory
from harts.plan.size import MicrobatchSize
from harts.tree import build_prefix_tree, tree_from_lcp

DIMENSIONS = ModelDimensions(
    num_dense_parameters=1000,
    num_expert_parameters=200,
    vocab_size=50,
    hidden_size=16,
    num_layers=4,
    num_full_attention_layers=1,
    windows=(7,),
    attention_width=16,
    num_linear_layers=3,
    linear_heads=2,
    linear_key_dim=4,
    linear_value_dim=5,
    chunk_size=8,
    saved_elements_per_token=400,
    bytes_per_element=2,
)


@settings(deadline=None)
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
    cost = CostModel.of_model(num_parameters=100, num_attention_layers=2, attention_width=15)
    assert (cost.flops_per_token, cost.flops_per_pair) == (600, 360)


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_bad_numbers_are_named(value):
    with pytest.raises(ValueError, match="flops_per_pair"):
        CostModel(flops_per_token=1.0, flops_per_pair=value)


@settings(deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=8), st.integers(1, 9))
def test_a_window_limits_what_a_token_sees(words, window):
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0, windows=((window, 5.0),))
    tree = build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))
    distinct = {word[: d + 1] for word in words for d in range(len(word))}
    assert cost.tree_work(tree) == sum(1 + 5 * min(len(prefix), window) for prefix in distinct)


PARAMETERS = CostParameters(
    per_token=2.0,
    per_expert_token=1.0,
    per_pair=0.5,
    per_window_pair=0.25,
    per_loss_edge=4.0,
    per_run=8.0,
    per_round=16.0,
    per_replayed=32.0,
    per_microbatch=64.0,
)
SIZE = MicrobatchSize(tokens=10, pairs=40, window_pairs=12, loss_edges=5, runs=3, rounds=2, replayed=1)


def test_every_part_of_a_microbatch_is_predicted():
    assert PARAMETERS.predict(SIZE) == 30 + 20 + 3 + 20 + 24 + 32 + 32 + 64
    assert PARAMETERS.predict(MicrobatchSize(tokens=0, pairs=0)) == 64


def test_planners_read_what_does_not_follow_from_depth_as_a_part_of_a_token():
    cost = PARAMETERS.for_planner(SIZE, windows=(3, 5))
    assert cost.flops_per_token == 2 + 1 + (20 + 24) / 10
    assert cost.flops_per_pair == 0.5
    assert cost.flops_per_microbatch == 64 + 16
    assert cost.windows == ((3, 0.25), (5, 0.25))
    with_replay = PARAMETERS.for_planner(SIZE, with_replay=True)
    assert with_replay.flops_per_token == 2 + 1 + (20 + 24 + 32) / 10


def test_flops_of_the_parts_of_a_model():
    cost = CostParameters.of_dimensions(DIMENSIONS)
    chunk_rule = 6 * 3 * 2 * (8 * (2 * 4 + 2 * 5) + 2 * 4 * 5)
    assert cost.per_token == 6 * 1000 + chunk_rule
    assert cost.per_expert_token == 6 * 200
    assert (cost.per_pair, cost.per_window_pair) == (12 * 16 * 1, 12 * 16)
    assert cost.per_loss_edge == 8 * 50 * 16
    assert (cost.per_run, cost.per_replayed) == (chunk_rule * 4, chunk_rule)
    assert (cost.per_round, cost.per_microbatch) == (0, 0)


def test_memory_of_a_microbatch():
    memory = microbatch_memory(DIMENSIONS, SIZE, logits_per_chunk=100)
    assert memory.activations == 10 * 400 * 2
    assert memory.activations_recomputed == 10 * (4 * 16 + 100) * 2
    assert memory.states == 3 * (3 * 2 * 4 * 5) * 4
    assert memory.logits == 3 * 100 * 4
    assert memory.total(recompute=True) < memory.total(recompute=False)


def test_what_autograd_was_measured_to_keep_counts():
    counted, measured = (microbatch_memory(DIMENSIONS, SIZE, saved_bytes_per_token=b) for b in (None, 1000.0))
    assert measured.activations == 10 * 1000
    assert measured.activations_recomputed == 10 * (4 * 16 * 2 + 1000 / 4)
    assert (measured.states, measured.logits) == (counted.states, counted.logits)


@pytest.mark.parametrize("name", ["per_token", "per_round"])
def test_bad_parameters_are_named(name):
    with pytest.raises(ValueError, match=name):
        CostParameters(**{name: -1.0})
