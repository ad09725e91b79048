"""Rows of what was computed are those of the tokens."""

from __future__ import annotations

import numpy as np
import pytest

import harts
from harts.check.recording import one_by_one, padded_together, record
from harts.data import TrajectoryBatch
from harts.models.tiny import tiny_model
from harts.testing import assert_close


@pytest.mark.parametrize("lengths", [(70, 9, 66), (63, 9)])
def test_padded_batches_give_every_token_what_it_gives_alone(lengths: tuple[int, ...]):
    """Whether or not their rows are longer than the longest trajectory."""
    rng = np.random.default_rng(0)
    trajectories = [
        harts.Trajectory.of(rng.integers(0, 97, length), loss_mask=[False] + [True] * (length - 1))
        for length in lengths
    ]
    batch, model = TrajectoryBatch.of(trajectories), harts.prepare(tiny_model("qwen3_5_text"))
    alone, together = (
        record(model, trajectories, plan) for plan in (one_by_one(batch), padded_together(batch, len(lengths)))
    )
    assert_close("outputs of the decoder", alone.hidden_FD, together.hidden_FD, ratio=1e-5)
    for name, layer_FD in alone.layers.items():
        assert_close(name, layer_FD, together.layers[name], ratio=1e-5)
