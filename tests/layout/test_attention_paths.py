"""Paths against the trajectories they came from."""

from __future__ import annotations

import numpy as np
import pytest

from harts.data import TrajectoryBatch
from harts.layout.attention_paths import attention_paths
from harts.layout.packed import LayoutNeeds, pack
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of


def test_worked_example():
    end, position = np.array([8, 8, 6, 5, 5, 6, 8, 8]), np.array([0, 1, 2, 3, 4, 3, 2, 3])
    paths = attention_paths(end, position)
    assert paths.key_index.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 7]
    assert paths.query_ends.tolist() == [0, 5, 6, 8]
    assert paths.key_ends.tolist() == [0, 5, 9, 13]
    assert (paths.most_queries, paths.most_keys) == (5, 5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_follow_parents(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1))
    paths = attention_paths(layout.subtree_end_T.numpy(), layout.position_T.numpy())
    parent, index = layout.parent_T.numpy(), paths.key_index.numpy()
    query_ends, key_ends = paths.query_ends.tolist(), paths.key_ends.tolist()
    assert query_ends[-1] == layout.num_tokens
    for number in range(len(key_ends) - 1):
        path = index[key_ends[number] : key_ends[number + 1]]
        assert parent[path[0]] == -1
        assert np.array_equal(parent[path[1:]], path[:-1])
        new = np.arange(query_ends[number], query_ends[number + 1])
        assert np.array_equal(path[path.size - new.size :], new)
    assert paths.most_queries == np.diff(query_ends).max()
    assert paths.most_keys == np.diff(key_ends).max()
