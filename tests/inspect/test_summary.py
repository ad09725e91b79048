"""Numbers of groups against layouts, sums, and what is known of published workloads."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.cli.model_names import find_costs
from harts.data import RolloutGroup, Trajectory
from harts.data.readers import read
from harts.data.trajectory import example_trajectories
from harts.inspect.groups import group_tree
from harts.inspect.predict import ModelCosts
from harts.inspect.summary import Inspection, report_chunks
from harts.layout.rounds import plan_runs, rounds_if_interior_states
from harts.plan.sharing import compare_sharing

WORKLOADS = next((p for f in Path(__file__).parents if (p := f / "shared" / "workloads").is_dir()), None)
HEADLINE = (
    *("groups", "trajectories", "tokens_flat", "tokens_distinct", "ratio", "branch_points", "max_depth"),
    *("rounds_f", "rounds_e", "replayed_tokens", "predicted_speedup", "skipped"),
)


def group_of(words: list[str], name: str = "") -> RolloutGroup:
    return RolloutGroup(name=name, trajectories=tuple(Trajectory.of([ord(c) for c in word]) for word in words))


def example() -> RolloutGroup:
    return RolloutGroup(name="letters", trajectories=tuple(example_trajectories()))


def test_worked_example():
    inspection = Inspection()
    inspection.add(group_tree(example()))
    numbers = inspection.report(skipped=3).to_dict()
    assert tuple(numbers)[: len(HEADLINE)] == HEADLINE
    assert [numbers[name] for name in HEADLINE] == [1, 4, 16, 8, 2.0, 2, 2, 1, 1, 5, None, 3]
    assert numbers["segment_length_quantiles"]["0.5"] == 2
    assert (numbers["trained_flat"], numbers["trained_distinct"], numbers["segments"]) == (12, 7, 5)


def test_a_group_alone_has_the_figures_of_the_whole():
    named = find_costs("tiny:qwen3_5_text")
    inspection = Inspection(
        ModelCosts(name="tiny", dimensions=named.dimensions, costs=named.costs, saved_bytes_per_token=None)
    )
    inspection.add(group_tree(group_of(["a" * 128 + "b" * 50, "a" * 128 + "c" * 70, "a" * 30 + "d"])))
    report = inspection.report()
    (group,), whole = (g.to_dict() for g in report.groups), report.to_dict()
    for row in whole["chunk_sizes"]:
        row.pop("rounds_f_median"), row.pop("rounds_e_median")
    shared = set(group) & set(whole)
    assert {"segment_length_quantiles", "chunk_sizes", "memory_bytes", "memory_bytes_recomputed"} < shared
    assert {name: group[name] for name in shared} == {name: whole[name] for name in shared}
    assert group["chunk_sizes"][0]["on_boundary"] == 0.5


def test_totals_are_sums_and_the_largest_over_groups():
    inspection = Inspection()
    for words in (["abcde", "abxy"], ["q" * 300, "q" * 200 + "r"], ["one"]):
        inspection.add(group_tree(group_of(words)))
    numbers = inspection.report().to_dict()
    expected = {
        "groups": 3,
        "trajectories": 5,
        "tokens_flat": 9 + 501 + 3,
        "tokens_distinct": 7 + 301 + 3,
        "branch_points": 2,
        "rounds_f": 2,
        "rounds_e": 2,
        "replayed_tokens": 2 + 200 % 64,
    }
    assert {name: numbers[name] for name in expected} == expected
    assert numbers["chunk_sizes"][0]["rounds_f_median"] == 1


def test_without_groups_there_is_no_report():
    with pytest.raises(ValueError, match="no trajectories"):
        Inspection().report()


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=14), min_size=1, max_size=9), st.integers(1, 5))
def test_rounds_and_replay_are_those_of_the_layout(words, chunk_size):
    tree = group_tree(group_of(words)).tree
    (chunk,) = report_chunks(tree, (chunk_size,))
    runs = plan_runs(tree, chunk_size)
    assert (chunk.rounds_f, chunk.replayed) == (runs.num_rounds, runs.num_replayed)
    assert chunk.rounds_e == rounds_if_interior_states(tree, chunk_size)
    children = {word[:depth]: {w[depth] for w in words if len(w) > depth and w.startswith(word[:depth])}
                for word in words for depth in range(1, len(word))}  # fmt: skip
    on_boundary = [prefix for prefix, next_ in children.items() if len(next_) > 1 and len(prefix) % chunk_size == 0]
    assert chunk.on_boundary == len(on_boundary)


def test_predictions_are_those_of_the_planner():
    named = find_costs("tiny:qwen3_5_text")
    model = ModelCosts(name="tiny", dimensions=named.dimensions, costs=named.costs, saved_bytes_per_token=None)
    groups = [group_tree(group_of(["a" * 400 + "b" * 50, "a" * 400 + "c" * 70])), group_tree(example())]
    inspection = Inspection(model)
    for group in groups:
        inspection.add(group)
    report = inspection.report()
    steps = [
        compare_sharing(g.tree, named.costs, loss_edges=(int(g.trained_S.sum()), g.trained_tokens)) for g in groups
    ]
    for group, step in zip(report.groups, steps, strict=True):
        assert group.prediction is not None
        assert (group.prediction.shared, group.prediction.flat) == (step.shared, step.flat)
    assert report.predicted_speedup == math.fsum(s.flat for s in steps) / math.fsum(s.shared for s in steps)
    assert report.to_dict()["memory_bytes"] > report.to_dict()["memory_bytes_recomputed"] > 0


@pytest.mark.skipif(WORKLOADS is None, reason="needs the shapes of real agent logs")
def test_published_shapes_have_the_published_numbers():
    assert WORKLOADS is not None
    rows = re.findall(r"^\| (\w+) \| (\d+) \|(.*)\|$", (WORKLOADS / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 6
    for name, groups, rest in rows:
        tokens, distinct, ratio, rounds, replayed = (cell.strip() for cell in rest.split("|"))
        inspection = Inspection()
        for group in read(WORKLOADS / f"{name}.jsonl.gz"):
            inspection.add(group_tree(group))
        numbers = inspection.report().to_dict()
        chunk = numbers["chunk_sizes"][0]
        found = [
            numbers["groups"],
            f"{numbers['tokens_flat']:,}",
            f"{numbers['tokens_distinct']:,}",
            f"{numbers['ratio']:.2f}",
            f"{math.floor(chunk['rounds_f_median'] + 0.5)}, {numbers['rounds_f']}",
            f"{chunk['replayed_share']:.1%}",
        ]
        assert found == [int(groups), tokens, distinct, ratio, rounds, replayed], name
