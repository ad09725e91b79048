"""Triton's interpreter in tests: import this before a file with kernels, in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy_2_4(tensor, scope):
    """Triton 3.6 takes int() of arrays with one element, which NumPy refuses since 2.4."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_for_numpy_2_4
