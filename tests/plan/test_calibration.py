"""Fits of made-up devices: known parameters come back, errors are those of samples that were held out."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.calibration import Calibration, Fit, Sample, busy, fit, nonnegative_least_squares
from harts.plan.cost import CostParameters
from harts.plan.size import MicrobatchSize
from tests.plan.test_cost import DIMENSIONS

HOST_SECONDS = 0.1
"""The least that a pass took on the H200, the smallest of 668 tokens."""
DEVICE = CostParameters(
    per_token=3e-6, per_pair=2e-9, per_loss_edge=5e-6, per_run=4e-5, per_round=3e-4, per_microbatch=2e-3
)


def samples_of(device: CostParameters, count: int, *, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        tokens, rounds = int(rng.integers(100, 20_000)), int(rng.integers(1, 40))
        size = MicrobatchSize(
            tokens=tokens,
            pairs=int(tokens * rng.integers(50, 4000)),
            loss_edges=int(tokens * rng.random()),
            runs=rounds * int(rng.integers(1, 20)),
            rounds=rounds,
            replayed=int(rng.integers(0, 1000)),
        )
        made.append(Sample(size=size, seconds=device.predict(size) * (1 + noise * rng.standard_normal())))
    return made


def test_costs_of_the_h200_predict_what_they_were_not_fitted_to():
    """To 5%, the bar; the file is what the simulation and the documentation take."""
    path = Path(__file__).parents[2] / "benchmarks/calibrations/h200_qwen3_5_1b.json"
    calibration = Calibration.from_json(path.read_text(encoding="utf-8"))
    for execution in (calibration.tree, calibration.flat):
        assert len(execution.held_out) >= 5
        assert execution.errors.max() < 0.05


def test_a_device_without_noise_is_found():
    fitted = fit(samples_of(DEVICE, 30), held_out=samples_of(DEVICE, 5, seed=1))
    for name, value in asdict(DEVICE).items():
        assert getattr(fitted.parameters, name) == pytest.approx(value, rel=1e-6, abs=1e-12), name
    assert fitted.errors.max() < 1e-6


def test_errors_are_those_of_the_held_out_samples():
    held_out = [replace(s, seconds=2 * s.seconds) for s in samples_of(DEVICE, 3, seed=2)]
    assert fit(samples_of(DEVICE, 30), held_out=held_out).errors == pytest.approx([0.5] * 3)


def test_noise_of_two_per_cent_gives_errors_of_that_size_and_no_negative_cost():
    fitted = fit(samples_of(DEVICE, 40, noise=0.02), held_out=samples_of(DEVICE, 10, seed=3))
    assert fitted.errors.max() < 0.05
    assert min(asdict(fitted.parameters).values()) >= 0


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 6))
def test_nonnegative_least_squares_meets_the_optimality_conditions(seed, columns, extra):
    rng = np.random.default_rng(seed)
    matrix, target = rng.standard_normal((columns + extra, columns)), rng.standard_normal(columns + extra)
    x = nonnegative_least_squares(matrix, target)
    descent = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (descent <= 1e-8).all()
    assert np.abs(descent[x > 0]).max(initial=0) <= 1e-8


def test_passes_that_the_host_is_longer_at_than_the_device_are_left_out():
    samples = samples_of(DEVICE, 60)
    least = float(np.median([s.seconds for s in samples])) / 3
    timed = [replace(s, seconds=max(least, s.seconds)) for s in samples]
    left = busy(timed, least)
    assert {s.seconds for s in left} == {s.seconds for s in samples if s.seconds >= 2 * least}
    fitted = fit(left, held_out=timed, least=least)
    assert fitted.errors.max() < 1e-6
    assert fitted.predict(MicrobatchSize(tokens=1, pairs=1)) == least
    with pytest.raises(ValueError, match=r"the host takes [0-9.]+ to start one.*--max-tokens"):
        busy(timed, max(s.seconds for s in timed))


@pytest.mark.parametrize(("execution", "median", "most"), [("tree", 0.01, 0.02), ("flat", 0.04, 0.12)])
def test_microbatches_of_an_h200_are_predicted(execution, median, most):
    """28 of each execution of a Qwen3.5 of 1B parameters, as `harts calibrate` timed them."""
    with (Path(__file__).parent / "h200_qwen3_5_1b.json").open(encoding="utf-8") as file:
        timed = [Sample(size=MicrobatchSize(**s["size"]), seconds=s["seconds"]) for s in json.load(file)[execution]]
    left = busy(timed, HOST_SECONDS)
    for first in range(4):
        held_out = left[first::4]
        errors = fit([s for s in left if s not in held_out], held_out=held_out, least=HOST_SECONDS).errors
        assert np.median(errors) < median
        assert errors.max() < most


def test_too_few_samples_and_bad_times_are_named():
    samples = samples_of(DEVICE, 8)
    with pytest.raises(ValueError, match="Got 7 samples for 7 parameters"):
        fit(samples[:7], held_out=[])
    with pytest.raises(ValueError, match="expected all > 0"):
        fit([*samples, replace(samples[0], seconds=0.0)], held_out=[])


def calibration(fitted: Fit | None = None) -> Calibration:
    fitted = fitted or fit(samples_of(DEVICE, 12), held_out=samples_of(DEVICE, 2, seed=1))
    return Calibration(
        model="tiny",
        device="a device",
        dtype="float32",
        dimensions=DIMENSIONS,
        tree=fitted,
        flat=fitted,
        saved_bytes_per_token=7.5,
    )


def test_json_round_trip_is_exact():
    assert Calibration.from_json(calibration().to_json()) == calibration()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"version": 2', '"version": 1', "version 1, expected 2"),
        ('"flat"', '"flam"', "damaged"),
        ('"vocab_size"', '"vocabulary"', "damaged.*vocab"),
        ('"held_out"', '"held"', "damaged.*a fit has the fields"),
    ],
)
def test_damaged_files_are_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        Calibration.from_json(calibration().to_json().replace(before, after))
