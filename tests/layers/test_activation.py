"""Kernels compute the activation of every model whose activation they know."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.activations import ACT2FN

from harts.layers import activation
from harts.layers.activation import activation_of_kernel, silu_after_convolution
from harts.models.tiny import tiny_model


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"])
def test_layers_of_mamba2_are_convolved_and_activated_at_once(model_type: str):
    acts = [m.act for m in tiny_model(model_type).modules() if isinstance(getattr(m, "conv1d", None), nn.Conv1d)]
    assert acts
    assert {activation_of_kernel(act) for act in acts} == {"silu"}


NAMES = {"silu": "silu", "swish": "silu", "gelu": "none", "relu": "none"}


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_only_what_kernels_know_is_left_to_them(name: str, expected: str):
    assert activation_of_kernel(ACT2FN[name]) == expected


@pytest.mark.parametrize(("installed", "expected"), [(False, "rounded silu"), (True, "silu")])
def test_sums_are_rounded_unless_causal_conv1d_is_there(
    monkeypatch: pytest.MonkeyPatch, installed: bool, expected: str
):
    monkeypatch.setattr(activation, "importable", {"causal_conv1d": installed}.__getitem__)
    assert silu_after_convolution() == expected
