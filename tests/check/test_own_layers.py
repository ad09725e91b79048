"""Functions of libraries that transformers binds to its layers are put aside for a while."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from harts.check.own_layers import own_layers
from harts.models.tiny import tiny_model

NAME = "torch_chunk_gated_delta_rule"


def test_bound_functions_are_put_aside_and_back(monkeypatch: pytest.MonkeyPatch):
    """As transformers does at import where fla is installed: a function that fails on these tensors wraps its own."""
    model, token_ids = tiny_model("qwen3_5_text"), torch.arange(70)[None]
    expected = model(token_ids, use_cache=False).logits

    @functools.wraps(getattr(modeling, NAME))
    def bound(*_args: object, **_options: object) -> None:
        raise RuntimeError("cpu tensor?")

    monkeypatch.setattr(modeling, NAME, bound)
    with pytest.raises(RuntimeError, match="cpu tensor"):
        model(token_ids, use_cache=False)
    with own_layers(model):
        assert torch.equal(model(token_ids, use_cache=False).logits, expected)
    assert getattr(modeling, NAME) is bound


def test_they_come_back_after_an_error():
    model, before = tiny_model("qwen3_5_text"), getattr(modeling, NAME)
    with pytest.raises(KeyError), own_layers(model):
        raise KeyError
    assert getattr(modeling, NAME) is before
