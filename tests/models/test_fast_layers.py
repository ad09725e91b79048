"""Layers' fast paths without a GPU: convolution into run order, kernels, gathers, outputs back in packed order."""

from __future__ import annotations

import pytest

from tests.triton_checks import run_interpreted

INTERPRETED = "tests/models/interpreted_layers.py"


@pytest.mark.slow
def test_models_in_the_interpreter():
    pytest.importorskip("fla")
    run_interpreted(INTERPRETED, marker="not slow")
