"""Which kernel linear attention runs with: a function of the tensors, the machine and the installed packages.

fla on NVIDIA GPUs in 16 bits, with the tree's states in one launch; plain PyTorch elsewhere. A kernel that was asked
for and cannot run is an error that says what to do.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harts.layers.capability import HALF, installed
from harts.layout.kernels import LinearKernel
from harts.layout.packed import PackedLayout

FLA_VERSION = "0.6"
"""Of fla-core, whose functions and registry `fla_backend.py` calls."""
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
    channel_decay: bool
    """Whether decays differ by key channel."""
    replay: bool = True
    """Whether chunks begin where those of each trajectory do."""


def linear_kernel(
    x: Tensor,
    layout: PackedLayout,
    *,
    widths: tuple[int, int],
    channel_decay: bool = False,
    only_if_asked: str | None = None,
) -> LinearKernel:
    """The kernel for a layer.

    Args:
        x: What the layer mixes: its device and dtype count.
        layout: Of the tokens.
        widths: K and V of its heads.
        channel_decay: Whether its decays differ by key channel.
        only_if_asked: Why the layer runs through PyTorch unless fla was asked for; None to prefer fla.

    Raises:
        ValueError: If the kernel asked for cannot run; the message names the fix.
    """
    needs = LinearNeeds(
        device=x.device,
        dtype=x.dtype,
        widths=widths,
        channel_decay=channel_decay,
        replay=layout.needs.replay,
    )
    return _choose(needs, layout.needs.kernels.linear_attention, only_if_asked)


@functools.cache
def _choose(needs: LinearNeeds, asked: LinearKernel | None, only_if_asked: str | None) -> LinearKernel:
    capability = torch.cuda.get_device_capability(needs.device) if needs.device.type == "cuda" else None
    obstacle = against_fla(needs, capability, {name: installed(name) for name in ("fla-core", "triton", "tilelang")})
    if asked == "fla" and obstacle is not None:
        raise ValueError(f"fla was asked for linear attention but cannot run: {obstacle}")
    obstacle = obstacle or only_if_asked
    kernel: LinearKernel = asked or ("fla" if obstacle is None else "torch")
    level = logging.WARNING if needs.device.type == "cuda" and kernel == "torch" else logging.INFO
    reason = "asked for" if asked is not None else obstacle or "the fastest"
    logger.log(level, "Linear attention runs with %s (%s)", kernel, reason)
    return kernel


def against_fla(
    needs: LinearNeeds, capability: tuple[int, int] | None, versions: Mapping[str, str | None]
) -> str | None:
    """Why fla cannot run a layer, None if it can.

    Args:
        needs: Of the layer.
        capability: CUDA compute capability of its device, None without CUDA.
        versions: Installed "fla-core", "triton" and "tilelang", None where there is none.
    """
    if capability is None:
        return f'its kernels run on NVIDIA GPUs, and the layer is on "{needs.device.type}". Move the model to a GPU.'
    fla, triton = versions["fla-core"], versions["triton"]
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
    # fla refuses: one of its kernels gives wrong gradients of keys there. TileLang's takes its place.
    refused = capability[0] == 9 and triton is not None and (3, 4) <= _numbers(triton) < (3, 7, 1)
    if refused and not needs.channel_decay and versions["tilelang"] is None:
        return f"on Hopper with Triton {triton} its backward pass needs TileLang. Run `pip install tilelang`."
    return None


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", name)[:3])
