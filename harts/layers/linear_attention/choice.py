"""Which kernel linear attention runs with: a function of the tensors, the machine and the installed packages.

fla on NVIDIA GPUs in 16 bits, with the tree's states in one launch; plain PyTorch elsewhere. A kernel that was asked
for and cannot run is an error that says what to do.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.layers.capability import HALF, installed
from harts.layout.kernels import LinearKernel
from harts.layout.packed import PackedLayout

FLA_VERSION = "0.6"
"""Of fla-core, whose inner functions `fla_delta_rule.py` and `fla_simple_gla.py` call."""
MAX_KEY_WIDTH = 256
WIDTH_STEP = 16
"""Of the matrix instructions."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearNeeds:
    """What a linear-attention layer asks of a kernel."""

    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, int]
    """K and V of its heads."""
    replay: bool = True
    """Whether chunks begin where those of each trajectory do."""


def linear_kernel(x: Tensor, layout: PackedLayout, *, widths: tuple[int, int]) -> LinearKernel:
    """The kernel for a layer.

    Args:
        x: What the layer mixes: its device and dtype count.
        layout: Of the tokens.
        widths: K and V of its heads.

    Raises:
        ValueError: If the kernel asked for cannot run; the message names the fix.
    """
    needs = LinearNeeds(device=x.device, dtype=x.dtype, widths=widths, replay=layout.needs.replay)
    return _choose(needs, layout.needs.kernels.linear_attention)


@functools.cache
def _choose(needs: LinearNeeds, asked: LinearKernel | None) -> LinearKernel:
    capability = torch.cuda.get_device_capability(needs.device) if needs.device.type == "cuda" else None
    obstacle = against_fla(needs, capability, installed("fla-core"))
    if asked == "fla" and obstacle is not None:
        raise ValueError(f"fla was asked for linear attention but cannot run: {obstacle}")
    kernel: LinearKernel = asked or ("fla" if obstacle is None else "torch")
    level = logging.WARNING if needs.device.type == "cuda" and kernel == "torch" else logging.INFO
    reason = "asked for" if asked is not None else obstacle or "the fastest"
    logger.log(level, "Linear attention runs with %s (%s)", kernel, reason)
    return kernel


def against_fla(needs: LinearNeeds, capability: tuple[int, int] | None, fla: str | None) -> str | None:
    """Why fla cannot run a layer, None if it can.

    Args:
        needs: Of the layer.
        capability: CUDA compute capability of its device, None without CUDA.
        fla: Installed version of fla-core, None where there is none.
    """
    if capability is None:
        return f'its kernels run on NVIDIA GPUs, and the layer is on "{needs.device.type}". Move the model to a GPU.'
    if fla is None or not fla.startswith(f"{FLA_VERSION}."):
        return (
            f"it needs fla-core {FLA_VERSION}, and {fla or 'none'} is installed. "
            f'Run `pip install "fla-core=={FLA_VERSION}.*"`.'
        )
    if needs.dtype not in HALF:
        return f"it computes in bfloat16 or float16, and the layer is {needs.dtype}. Convert the model."
    if needs.widths[0] > MAX_KEY_WIDTH or any(width % WIDTH_STEP for width in needs.widths):
        return (
            f"it takes heads of multiples of {WIDTH_STEP} channels, keys of up to {MAX_KEY_WIDTH}, not {needs.widths}. "
            'Run the layer with linear_attention="torch".'
        )
    if not needs.replay:
        return "its chunks begin where those of each trajectory do. Leave out replay=False."
    return None
