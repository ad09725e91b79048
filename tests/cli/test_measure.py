"""What `harts calibrate` times and counts."""

from __future__ import annotations

import weakref

import pytest
import torch
from typer.testing import CliRunner

from harts.cli import measure
from harts.cli.load_model import load_model
from harts.cli.main import app
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.packed import pack
from harts.models import prepare
from harts.tree import build_prefix_tree


def test_counting_what_is_kept_keeps_nothing():
    model = prepare(load_model("tiny:qwen3", dtype=torch.float32, device="cpu"))
    outputs = []
    for layer in model.module.modules():
        layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output))
    trajectories = TrajectoryBatch.of([Trajectory.of([1, 2, 3], loss_mask=[False, True, True])])
    layout = pack(build_prefix_tree(trajectories), trajectories, model.needs)
    assert measure._saved_bytes(layout, model) > 0
    kept = [weakref.ref(output) for output in outputs if isinstance(output, torch.Tensor)]
    outputs.clear()
    assert kept
    assert not any(output() is not None for output in kept)


def test_measuring_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "_seconds", lambda model, layout: 1.0)
    said: list[tuple[int, int]] = []
    measure.measure("tiny:qwen3", device="cpu", max_tokens=256, progress=lambda *both: said.append(both))
    assert said == [(done, len(said)) for done in range(1, len(said) + 1)]


def test_tiny_numbers_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch):
    flushed = []

    def look(model: object, layout: object) -> float:
        flushed.append(bool((torch.tensor([1e-39]) * 1.0 == 0).all()))
        return 1.0

    monkeypatch.setattr(measure, "REPEATS", 1)
    monkeypatch.setattr(measure, "_seconds", look)
    measure.measure("tiny:qwen3", device="cpu", max_tokens=256)
    assert all(flushed)
    assert torch.tensor([1e-39]) * 1.0 != 0


def test_a_device_without_memory_is_named(monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(measure, "_seconds", fail)
    result = CliRunner().invoke(app, ["calibrate", "--model", "tiny:qwen3", "--max-tokens", "256"])
    assert result.exit_code == 2
    assert "no memory is left at microbatches of 256 tokens" in result.output
