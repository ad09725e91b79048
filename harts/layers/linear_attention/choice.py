"""Which kernel linear attention runs with: a function of the tensors, the machine and the installed packages.

fla on NVIDIA GPUs in 16 bits, with the tree's states in one launch; plain PyTorch elsewhere. A kernel that was asked
for and cannot run is an error that says what to do.
"""

from __future__ import annotations

import functools
import logging
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from harts.layout.kernels import Kernels, LinearKernel
from harts.layout.packed import PackedLayout

FLA_VERSION = "0.6"
"""Of fla-core, whose functions and registry `fla_backend.py` calls."""
HALF = (torch.bfloat16, torch.float16)
MAX_KEY_WIDTH = 256

logger = logging.getLogger(__name__)


def linear_kernel(x: Tensor, layout: PackedLayout, *, key_width: int) -> LinearKernel:
    """The kernel for a layer.

    Args:
        x: What the layer mixes: its device and dtype count.
        layout: Of the tokens.
        key_width: K of its heads.

    Raises:
        ValueError: If the kernel asked for cannot run; the message names the fix.
    """
    return _choose(x.device, x.dtype, key_width, layout.needs.replay, layout.needs.kernels)


@functools.cache
def _choose(device: torch.device, dtype: torch.dtype, key_width: int, replay: bool, kernels: Kernels) -> LinearKernel:
    obstacle = _against_fla(device, dtype, key_width, replay)
    asked = kernels.linear_attention
    if asked == "fla" and obstacle is not None:
        raise ValueError(f"fla was asked for linear attention but cannot run: {obstacle}")
    kernel: LinearKernel = asked or ("fla" if obstacle is None else "torch")
    level = logging.WARNING if device.type == "cuda" and kernel == "torch" else logging.INFO
    reason = "asked for" if asked is not None else obstacle or "the fastest"
    logger.log(level, "Linear attention runs with %s (%s)", kernel, reason)
    return kernel


def _against_fla(device: torch.device, dtype: torch.dtype, key_width: int, replay: bool) -> str | None:
    if device.type != "cuda":
        return f'its kernels run on NVIDIA GPUs, and the layer is on "{device.type}". Move the model to a GPU.'
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        installed = None
    if installed is None or not installed.startswith(FLA_VERSION + "."):
        return (
            f"it needs fla-core {FLA_VERSION}, and {installed or 'none'} is installed. "
            f'Run `pip install "fla-core=={FLA_VERSION}.*"`.'
        )
    if dtype not in HALF:
        return f"it computes in bfloat16 or float16, and the layer is {dtype}. Convert the model."
    if key_width > MAX_KEY_WIDTH:
        return f"it takes heads of up to {MAX_KEY_WIDTH} key channels, not {key_width}."
    if not replay:
        return "its chunks begin where those of each trajectory do; leave out replay=False."
    return None
