"""What is installed, and which tensors our Triton kernels take: asked by every layer that has a kernel."""

from __future__ import annotations

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
"""What tensor cores multiply; other dtypes run through PyTorch."""


def installed(package: str) -> str | None:
    """Version of a package, None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def takes_triton(x: Tensor) -> bool:
    """Whether a tensor is in 16 bits on a GPU, and Triton there to compile for it."""
    return x.is_cuda and x.dtype in HALF and importable("triton")


@functools.cache
def importable(package: str) -> bool:
    """Whether a top-level package can be found, without importing it; looked for once."""
    return importlib.util.find_spec(package) is not None
