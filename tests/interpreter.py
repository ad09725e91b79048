"""Triton's interpreter in tests: import this before a file with kernels, in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy_2_4(tensor, scope):
    """Triton 3.6 takes int() of arrays with one element, which NumPy refuses since 2.4."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_for_numpy_2_4


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a kernel does not write is NaN."""
    for owner, name in ((Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


def _filled(make: Any) -> Any:
    def make_filled(*args: Any, **options: Any) -> Tensor:
        tensor = make(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return make_filled
