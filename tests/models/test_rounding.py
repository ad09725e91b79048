"""In 16 bits, layers round where transformers' own do: a tree is then as near to flat as flat packed otherwise."""

from __future__ import annotations

import pytest
import torch

import harts
from harts.check.equal_inputs import differences_on_equal_inputs
from harts.check.recording import one_tree
from harts.data import TrajectoryBatch
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.tree import build_prefix_tree
from tests.cases import BESIDE, ROUNDED_IN_TRANSFORMERS, trajectories_of

EPS = torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("model_type", supported_types())
def test_layers_on_equal_inputs_differ_by_less_than_a_rounding(model_type: str):
    model = harts.prepare(tiny_model(model_type, dtype=torch.bfloat16))
    trajectories = trajectories_of(BESIDE)
    plans = {"tree": one_tree(build_prefix_tree(TrajectoryBatch.of(trajectories)))}
    largest = max(differences_on_equal_inputs(model, trajectories, plans)["tree"].values())
    if model_type in ROUNDED_IN_TRANSFORMERS:
        assert 0.2 * EPS < largest < EPS
    else:
        assert largest < 0.2 * EPS
