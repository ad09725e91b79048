"""Index tables of the GPU kernels, against a walk along every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts.data import TrajectoryBatch
from harts.layout.conv_index import conv_index, row_index
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of


def layout_of(case: Case) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=64, conv_width=4))


def test_worked_example():
    index = conv_index(np.array([-1, 0, 1, 2, 3, 2, 1, 6]), 2)
    assert index.ancestors_TJ.tolist() == [[0, -1], [1, 0], [2, 1], [3, 2], [4, 3], [5, 2], [6, 1], [7, 6]]
    assert index.branch_token_M.tolist() == [1, 2]
    assert index.branch_offsets.tolist() == [0, 3, 6]
    assert index.branch_distance.tolist() == [0, 1, 1, 0, 1, 1]
    assert [index.slot_T.tolist().index(slot) for slot in index.branch_slot.tolist()] == [1, 2, 6, 2, 3, 5]
    assert index.num_slots == 5
    assert index.rows.num_shared == 0


def test_a_chain_has_no_exceptions():
    index = conv_index(np.arange(100) - 1, 8)
    assert (index.num_branching, index.num_slots, index.rows.num_shared) == (0, 0, 0)
    assert index.slot_T.eq(-1).all()


@pytest.mark.parametrize("taps", [2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_descendants_are_all_that_reach_a_token(case: Case, taps: int):
    layout = layout_of(case)
    parent = layout.parent_T.tolist()
    index = conv_index(layout.parent_T.numpy(), taps, layout.runs)
    ancestors = index.ancestors_TJ.tolist()
    below: dict[int, list[tuple[int, int]]] = {token: [] for token in range(len(parent))}
    for token in range(len(parent)):
        above = token
        for distance in range(taps):
            below[above].append((distance, token))
            assert ancestors[token][distance] == above
            above = parent[above]
            if above < 0:
                assert set(ancestors[token][distance + 1 :]) <= {-1}
                break
    token_of_slot = {slot: token for token, slot in enumerate(index.slot_T.tolist()) if slot >= 0}
    assert sorted(token_of_slot) == list(range(index.num_slots))
    listed = {}
    offsets = index.branch_offsets.tolist()
    for m, token in enumerate(index.branch_token_M.tolist()):
        entries = slice(offsets[m], offsets[m + 1])
        slots, distances = index.branch_slot[entries].tolist(), index.branch_distance[entries].tolist()
        listed[token] = [(distance, token_of_slot[slot]) for slot, distance in zip(slots, distances, strict=True)]
    for token, descendants in below.items():
        if all(descendant == token + distance for distance, descendant in descendants):
            assert token not in listed
        else:
            assert listed[token] == sorted(descendants)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows_of_every_token(case: Case):
    layout = layout_of(case)
    assert layout.runs is not None
    index = row_index(layout.num_tokens, layout.runs)
    rows: dict[int, list[int]] = {token: [] for token in range(layout.num_tokens)}
    for row, token in enumerate(layout.runs.token_R.tolist()):
        rows[token].append(row)
    assert index.first_row_T.tolist() == [rows[token][0] for token in range(layout.num_tokens)]
    assert torch.equal(index.token_R[index.owner_T], torch.arange(layout.num_tokens, dtype=torch.int32))
    assert index.owned_token_R.ge(0).sum() == layout.num_tokens
    assert torch.equal(index.owned_token_R[index.owner_T], torch.arange(layout.num_tokens, dtype=torch.int32))
    shared = [token for token in rows if len(rows[token]) > 1]
    assert index.shared_token_U.tolist() == shared
    assert index.shared_slot_T[shared].tolist() == list(range(len(shared)))
    assert index.shared_rows.tolist() == [row for token in shared for row in rows[token]]
    assert index.shared_offsets.diff().tolist() == [len(rows[token]) for token in shared]
    assert index.shared_slot_T.ge(0).sum() == len(shared)


def test_a_width_of_one_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        conv_index(np.array([-1, 0]), 1)
