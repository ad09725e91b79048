"""Parts of the router losses on their own: sums along paths, closed-form gradients, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harts.data import TrajectoryBatch
from harts.layers.moe.losses import squared_logsumexp, z_gradient
from harts.layers.moe.scores import Scores, logit_gradient, probabilities
from harts.layers.moe.statistics import RouterStatistics
from harts.layout.flat import flat_layout
from harts.layout.packed import LayoutNeeds, flat_to_packed, pack
from harts.layout.paths import TokenPaths, doubling_jumps
from harts.tree import build_prefix_tree
from tests.cases import CASES, Case, trajectories_of

NEEDS = LayoutNeeds(chunk_size=None, conv_width=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sums_along_paths_and_back(case: Case):
    batch = TrajectoryBatch.of(trajectories_of(case))
    tree = build_prefix_tree(batch)
    layout = pack(tree, batch, NEEDS)
    generator = torch.Generator().manual_seed(0)
    values_TX = torch.randn(layout.num_tokens, 3, generator=generator, dtype=torch.float64)
    back_NX = torch.randn(batch.num_trajectories, 3, generator=generator, dtype=torch.float64)
    packed = np.split(flat_to_packed(tree), np.cumsum(tree.length_N)[:-1])
    expected_NX = torch.stack([values_TX[path].sum(0) for path in packed])
    torch.testing.assert_close(layout.paths.sum_along(values_TX), expected_NX, rtol=1e-12, atol=1e-12)
    expected_TX = torch.zeros_like(values_TX)
    for path, value_X in zip(packed, back_NX, strict=True):
        expected_TX[path] += value_X
    torch.testing.assert_close(layout.paths.spread(back_NX), expected_TX, rtol=1e-12, atol=1e-12)
    one_N = torch.ones(batch.num_trajectories, 1, dtype=torch.float64)
    assert torch.equal(layout.paths.spread(one_N)[:, 0].long(), layout.multiplicity_T)


def test_padding_of_a_flat_batch_counts_for_nothing():
    batch = TrajectoryBatch.of(trajectories_of(CASES[0]))
    paths = flat_layout(batch, np.array([3, 0])).paths
    ones = paths.spread(torch.ones(2, 1))
    assert ones[:, 0].tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    kept = torch.where(ones > 0, ones, torch.nan)
    assert paths.sum_along(kept)[:, 0].tolist() == [3, 5]


def test_a_long_chain_needs_few_steps():
    jumps = doubling_jumps(np.arange(100_000) - 1)
    assert len(jumps) == 18
    paths = TokenPaths(
        segment_T=torch.arange(100_000),
        jumps=jumps,
        tail_N=torch.tensor([99_999, 10]),
        length_N=np.array([100_000, 11]),
        weight_N=np.ones(2),
    )
    assert paths.sum_along(torch.ones(100_000, 1))[:, 0].tolist() == [100_000, 11]
    assert paths.spread(torch.ones(2, 1))[[0, 10, 11, 99_999], 0].tolist() == [2, 2, 1, 1]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_closed_form_gradients_are_those_of_autograd(scores: Scores):
    logits_TX = 3 * torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slope_TX = torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits_TX.requires_grad_()
    (expected,) = torch.autograd.grad((slope_TX * probabilities(logits_TX, scores)).sum(), logits_TX)
    torch.testing.assert_close(logit_gradient(logits_TX.detach(), slope_TX, scores), expected, rtol=1e-12, atol=1e-14)
    (expected,) = torch.autograd.grad(squared_logsumexp(logits_TX).sum(), logits_TX)
    torch.testing.assert_close(z_gradient(logits_TX.detach()), expected, rtol=1e-12, atol=1e-14)


def test_statistics_of_an_even_and_a_one_sided_load():
    load_MX = np.array([[5.0, 5.0, 5.0, 5.0], [20.0, 0.0, 0.0, 0.0]])
    statistics = RouterStatistics(layers=("a", "b"), load_MX=load_MX, num_tokens=20.0)
    assert statistics.max_violation_M.tolist() == [0, 3]
    assert statistics.entropy_M == pytest.approx([np.log(4), 0])
    twice = statistics + statistics
    assert twice.load_MX.sum() == 80 and twice.num_tokens == 40
