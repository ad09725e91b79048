"""The test whether sharing pays, against predictions of the trees that it would make."""

from __future__ import annotations

import numpy as np
import pytest

from harts.plan.cost import CostParameters
from harts.plan.sharing import ExecutionCosts, compare_sharing, decide
from harts.plan.size import size_of_flat, size_of_tree
from harts.tree import PrefixTree, tree_from_lcp

TOKENS = CostParameters(per_token=1.0)


def forest(*groups: tuple[list[int], list[int]]) -> PrefixTree:
    lengths, lcps = ([value for group in groups for value in group[k]] for k in (0, 1))
    return tree_from_lcp(np.arange(len(lengths)), lengths, lcps)


WORKED = ([3, 5, 4, 4], [0, 3, 3, 2])


def test_worked_example_counts_tokens():
    report = compare_sharing(forest(WORKED), ExecutionCosts(tree=TOKENS, flat=TOKENS))
    assert (report.shared, report.flat, report.speedup, report.pays) == (8, 16, 2, True)
    (tree,) = report.trees
    assert (tree.num_trajectories, tree.ratio, tree.num_forks, tree.num_losing_forks) == (4, 2.0, 2, 0)
    assert "sharing pays: predicted 2.00x" in report.text()


def test_each_tree_has_its_own_answer():
    # A round costs more than sharing one token of two short ones saves, and less than sharing ninety.
    costs = ExecutionCosts(tree=CostParameters(per_token=1.0, per_round=5.0), flat=TOKENS, chunk_size=2)
    report = compare_sharing(forest(([100, 100], [0, 90]), ([3, 3], [0, 1]), ([7], [0])), costs)
    assert [t.pays for t in report.trees] == [True, False, False]
    assert [(t.shared, t.flat) for t in report.trees] == [(120, 200), (10, 6), (12, 7)]
    assert "1 of 3 pay" in report.text()


def test_a_losing_fork_is_found_and_its_gain_is_the_predicted_one():
    costs = ExecutionCosts(tree=CostParameters(per_token=1.0, per_replayed=3.0, per_run=4.0), flat=TOKENS, chunk_size=8)
    kept = forest(([20, 20, 30], [0, 2, 18]))
    cut = forest(([20], [0]), ([20, 30], [0, 18]))
    (tree,) = compare_sharing(kept, costs).trees
    # At depth 2 two tokens are replayed at 3 each, and computing them again costs 2; at 18 the prefix costs 18.
    assert (tree.num_forks, tree.num_losing_forks, tree.cut_gain) == (2, 1, 4)
    predicted = [costs.tree.predict(size_of_tree(t, chunk_size=8)) for t in (kept, cut)]
    assert predicted[0] - predicted[1] == tree.cut_gain


def test_flat_execution_wins_where_its_parameters_are_lower():
    costs = ExecutionCosts(tree=CostParameters(per_token=3.0), flat=TOKENS)
    report = compare_sharing(forest(WORKED), costs)
    assert not report.pays
    assert "does not pay" in report.text()
    assert [decide(mode, report) for mode in ("auto", "always", "never")] == [False, True, False]


def test_loss_edges_count_for_the_step():
    head = CostParameters(per_loss_edge=1.0)
    report = compare_sharing(forest(WORKED), ExecutionCosts(tree=head, flat=head), loss_edges=(7, 12))
    assert (report.shared, report.flat) == (7, 12)


def test_a_window_and_a_flat_row_are_counted_alike():
    costs = CostParameters(per_window_pair=1.0)
    tree = forest(([9], [0]))
    report = compare_sharing(tree, ExecutionCosts(tree=costs, flat=costs, windows=(4,)))
    assert report.shared == report.flat == size_of_flat(tree.length_N, windows=(4,)).window_pairs == 30


def test_an_unknown_mode_is_named():
    report = compare_sharing(forest(WORKED), ExecutionCosts(tree=TOKENS, flat=TOKENS))
    with pytest.raises(ValueError, match="sometimes"):
        decide("sometimes", report)  # type: ignore[arg-type]
