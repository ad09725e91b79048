"""Plans recounted from the trees of their microbatches."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.plan import CostModel, Plan, make_plan
from harts.tree import PrefixTree, build_prefix_tree

COST = CostModel(flops_per_token=0.1, flops_per_pair=0.03)
words_strategy = st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=10)


def tree_of(words: list[str]) -> PrefixTree:
    return build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))


def example_plan(limit: int, *, sharing: bool = True) -> Plan:
    tree = build_prefix_tree(TrajectoryBatch.of(example_trajectories()))
    return make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, sharing=sharing)


def num_distinct(words: list[str]) -> int:
    return len({word[: d + 1] for word in words for d in range(len(word))})


def test_worked_example_with_sharing():
    one, two = example_plan(6).slots[0]
    assert (one.trajectories, one.num_tokens, one.num_trajectory_tokens) == ((3, 0, 2), 6, 12)
    assert (two.trajectories, two.num_tokens, two.num_trajectory_tokens) == ((1,), 4, 4)
    assert [m.trajectories for m in example_plan(8).slots[0]] == [(3, 0, 2, 1)]


def test_worked_example_without_sharing_sorts_by_length():
    # 10 padded tokens hold abcde + one word of 4, then 4 + 3.
    assert [m.trajectories for m in example_plan(10, sharing=False).slots[0]] == [(0, 2), (3, 1)]
    assert [m.num_tokens for m in example_plan(10, sharing=False).slots[0]] == [9, 7]


def test_what_flat_rows_are_padded_to_counts():
    # Rows of 100 tokens become rows of 104.
    tree = tree_of(["abcd" * 25, "bcda" * 25, "cdab" * 25, "dabc" * 25])
    sizes = []
    for limit in (415, 416):
        plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, sharing=False)
        sizes.append([len(m.trajectories) for m in plan.slots[0]])
    assert sizes == [[3, 1], [4]]


@given(words_strategy, st.integers(0, 20), st.booleans())
def test_microbatches_hold_each_trajectory_once_within_the_limit(words, spare, sharing):
    tree, limit = tree_of(words), max(map(len, words)) + spare
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=COST, sharing=sharing)
    assert sorted(i for m in plan.slots[0] for i in m.trajectories) == list(range(len(words)))
    for m in plan.slots[0]:
        members = [words[i] for i in m.trajectories]
        assert members == sorted(members)
        assert m.num_trajectory_tokens == sum(map(len, members))
        alone = tree.restrict(m.trajectories)
        assert m.trajectories == tuple(alone.order_N)
        if sharing:
            assert m.num_tokens == alone.num_tokens == num_distinct(members) <= limit
            assert m.predicted_work == COST.tree_work(alone)
        else:
            assert m.num_tokens == m.num_trajectory_tokens
            assert len(members) * max(map(len, members)) <= limit
            assert m.predicted_work == pytest.approx(sum(COST.path_work(len(word)) for word in members))


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=7), st.integers(0, 8))
def test_no_cuts_of_the_order_make_less_work_on_one_rank(words, spare):
    limit = max(map(len, words)) + spare
    ordered = sorted(words)

    def work(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(ordered)]
        parts = [ordered[a:b] for a, b in pairwise(bounds)]
        if any(num_distinct(part) > limit for part in parts):
            return math.inf
        return sum(COST.tree_work(tree_of(part)) for part in parts)

    least = min(work(cuts) for k in range(len(ordered)) for cuts in combinations(range(1, len(ordered)), k))
    plan = make_plan(tree_of(words), max_tokens_per_microbatch=limit, cost=COST)
    assert plan.makespan <= least * (1 + 1e-9)


@given(words_strategy, st.integers(0, 8), st.booleans(), st.data())
def test_order_of_the_batch_does_not_change_the_work(words, spare, sharing, data):
    limit = max(map(len, words)) + spare
    shuffled = data.draw(st.permutations(words))
    plans = [
        make_plan(tree_of(w), max_tokens_per_microbatch=limit, cost=COST, sharing=sharing) for w in (words, shuffled)
    ]
    one, other = ([(m.num_tokens, m.num_trajectory_tokens, m.predicted_work) for m in p.slots[0]] for p in plans)
    assert one == other


def test_an_over_long_trajectory_is_named_with_the_limit_to_set():
    with pytest.raises(ValueError, match=r"Trajectory 0 has 5 tokens .* is 3 \(3 in all .* at least 5"):
        example_plan(3)
    with pytest.raises(ValueError, match="Trajectory 0 has 5 tokens"):
        example_plan(4, sharing=False)


@pytest.mark.parametrize("sharing", [True, False])
def test_json_round_trip_is_exact(sharing):
    plan = example_plan(6, sharing=sharing)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest == plan.digest


STORED = """
{"barrier": true, "lower_bound": 1.8699997711181569, "max_tokens_per_microbatch": 6, "overhead": 0.0,
 "peers": {"contiguous": 2.0600000000000005, "greedy": 1.87, "sequences": 2.3500000000000005, "whole_trees": 1.87},
 "sharing": true, "version": 2, "slots": [[
  {"num_tokens": 6, "num_trajectory_tokens": 12, "predicted_work": 1.17, "trajectories": [3, 0, 2]},
  {"num_tokens": 4, "num_trajectory_tokens": 4, "predicted_work": 0.7, "trajectories": [1]}]]}
"""


def test_digest_tells_plans_apart_and_stays_what_it_was():
    # Stored plans carry it: a change here needs a new FORMAT_VERSION.
    assert Plan.from_json(STORED).digest == "44adcf6bece8f9cc987994254e0cea3c6624d3602b0b2118441a5c3e4f8a4ddd"
    assert len({example_plan(6).digest, example_plan(7).digest, example_plan(6, sharing=False).digest}) == 3


@pytest.mark.parametrize("text", ["[]", "{"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="version None" if text == "[]" else "Expecting property name"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(version=1), "version 1, expected 2"),
        (lambda f: f.pop("sharing"), "sharing"),
        (lambda f: f["slots"][0][0].pop("num_tokens"), "num_tokens"),
        (lambda f: f["slots"][0][0].update(color=1), "color"),
        (lambda f: f["slots"].append([]), r"\[2, 0\] slots"),
    ],
)
def test_damaged_plans_are_refused(change, message):
    fields = json.loads(example_plan(6).to_json())
    change(fields)
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(fields))
