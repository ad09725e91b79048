"""Packing moves data only, so everything here is equality."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts.data import Trajectory, TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.layout.flat import flat_layout
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

NEEDS = LayoutNeeds(chunk_size=64, conv_width=4, query_block_size=16)


def packed(batch: TrajectoryBatch, needs: LayoutNeeds = NEEDS) -> PackedLayout:
    return pack(build_prefix_tree(batch), batch, needs)


def test_worked_example():
    layout = packed(TrajectoryBatch.of(example_trajectories()), LayoutNeeds(chunk_size=2, conv_width=3))
    assert "".join("abcdexyz"[i] for i in layout.token_ids_T) == "abcdezxy"
    assert layout.position_T.tolist() == [0, 1, 2, 3, 4, 3, 2, 3]
    assert layout.parent_T.tolist() == [-1, 0, 1, 2, 3, 2, 1, 6]
    assert layout.subtree_end_T.tolist() == [8, 8, 6, 5, 5, 6, 8, 8]
    assert layout.multiplicity_T.tolist() == [4, 4, 3, 1, 1, 1, 1, 1]
    assert layout.ancestors_JT.tolist() == [[8, 0, 1, 2, 3, 2, 1, 6], [8, 8, 0, 1, 2, 1, 0, 1]]
    # b and c are predicted once for all; d, z and x share their predictors with c and each other.
    assert layout.edges.predictor_E.tolist() == [0, 1, 2, 3, 2, 1, 6]
    assert layout.edges.edge_P.numel() == 16 - 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_trajectory_is_restored(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    layout = pack(tree, batch, NEEDS)
    restore_F = flat_to_packed(tree)
    begin_N = np.cumsum(tree.length_N) - tree.length_N
    for number, begin, length in zip(tree.order_N, begin_N, tree.length_N, strict=True):
        path = torch.from_numpy(restore_F[begin : begin + length])
        ids = batch.token_ids_F[batch.offsets[number] : batch.offsets[number] + length]
        assert layout.token_ids_T[path].tolist() == ids.tolist()
        assert layout.position_T[path].tolist() == list(range(length))
        assert layout.parent_T[path].tolist() == [-1, *path[:-1].tolist()]
    assert layout.multiplicity_T.tolist() == np.bincount(restore_F).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_query_blocks_hold_every_visible_key(case: Case):
    layout = packed(TrajectoryBatch.of(trajectories_of(case)))
    for block in layout.query_blocks:
        keys = torch.arange(layout.num_tokens)[block.keys].tolist()
        wanted = set()
        for token in range(block.start, block.end):
            while token >= 0:
                wanted.add(token)
                token = int(layout.parent_T[token])  # noqa: PLW2901 - walks up the path
        assert keys == sorted(wanted)
    assert [b.start for b in layout.query_blocks] == list(range(0, layout.num_tokens, 16))


@pytest.mark.parametrize("window", [1, 20, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windows_drop_only_keys_that_no_query_sees(case: Case, window: int):
    layout = packed(TrajectoryBatch.of(trajectories_of(case)))
    for block in layout.query_blocks:
        kept = torch.arange(layout.num_tokens)[block.keys_in_window(window)].tolist()
        whole = torch.arange(layout.num_tokens)[block.keys].tolist()
        assert kept == whole[len(whole) - len(kept) :]
        for token in range(block.start, block.end):
            for _ in range(window):
                if token >= 0:
                    assert token in kept
                    token = int(layout.parent_T[token])  # noqa: PLW2901 - walks up the path


def test_windows_cost_the_window_not_the_depth():
    rng = np.random.default_rng(0)
    trunk = rng.integers(0, 50, 3000)
    words = [np.concatenate([trunk[:n], rng.integers(0, 50, 40)]) for n in range(1500, 3000, 100)]
    layout = packed(TrajectoryBatch.of([Trajectory.of(word) for word in [trunk, *words]]))
    keys = torch.arange(layout.num_tokens)
    kept = [keys[block.keys_in_window(8)].numel() for block in layout.query_blocks]
    blocks = len(kept)
    # Of a path's keys, each is kept beyond its window by the one block in which its subtree ends.
    assert sum(kept) <= blocks * (8 + 16) + layout.num_tokens
    assert sum(keys[block.keys].numel() for block in layout.query_blocks) > 20 * sum(kept)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tree_and_flat_edges_name_the_same_predictions(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    layout = packed(batch)
    order = build_prefix_tree(batch).order_N
    flat = flat_layout(batch, order)
    for name in ("target_E", "temperature_E"):
        tree_P = getattr(layout.edges, name)[layout.edges.edge_P]
        assert torch.equal(tree_P, getattr(flat.edges, name)[flat.edges.edge_P])
    predicting = layout.token_ids_T[layout.edges.predictor_E][layout.edges.edge_P]
    assert torch.equal(predicting, flat.token_ids_NL.reshape(-1)[flat.edges.predictor_E][flat.edges.edge_P])


def test_trajectories_at_other_temperatures_share_tokens_but_no_edges():
    batch = TrajectoryBatch.of([Trajectory.of([1, 2, 3], temperature=t) for t in (1.0, 0.5, 1.0)])
    layout = packed(batch)
    assert layout.num_tokens == 3
    assert sorted(layout.edges.temperature_E.tolist()) == [0.5, 0.5, 1.0, 1.0]
    assert layout.edges.edge_P.numel() == 6


def test_share_keys_fork_the_tree():
    same, other = ([0, 7, 7, 7], [0, 7, 8, 7])
    batch = TrajectoryBatch.of([Trajectory.of([1, 2, 3, 4], share_key=key) for key in (same, other, same)])
    assert packed(batch).num_tokens == 2 + 2 * 2


def test_a_chain_of_many_segments_needs_no_recursion():
    trunk = np.random.default_rng(0).integers(0, 50, 20_000)
    batch = TrajectoryBatch.of([Trajectory.of(trunk[:n], loss_mask=np.zeros(n)) for n in range(1, trunk.size, 20)])
    layout = packed(batch)
    assert layout.num_tokens == 19_981
    assert layout.runs is not None
    assert layout.runs.num_rounds == 1
