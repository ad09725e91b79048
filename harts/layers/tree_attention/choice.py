"""Which kernel tree attention runs with: a pure function of the machine, the model and the installed packages.

The order is FlashAttention-4 on Hopper, FlexAttention on other NVIDIA GPUs, SDPA block by block everywhere else. A
kernel that was asked for by name and cannot run is an error that says what to do; nothing falls back silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harts.layers.capability import HALF, installed
from harts.layout.kernels import ATTENTION_KERNELS, AttentionKernel

FLASH_ATTENTION_VERSION = "4.0.0b36"
"""Of flash-attn-4, the one version whose inner functions and tiles `flash4.py` knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What the attention layers of a model ask of a kernel."""

    dtype: torch.dtype
    """Of queries, keys and values."""
    head_width: int
    """K."""
    value_width: int
    """V."""
    grouped: bool
    """Whether there are fewer key heads than query heads."""
    deterministic: bool = False
    """Whether two runs must give equal gradients, bit for bit."""
    exact: bool = False
    """Whether a token's output must have the bits that its trajectory gives alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where it runs."""

    device_type: str
    """torch's name: "cuda", "cpu", ..."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None without CUDA."""
    versions: Mapping[str, str]
    """Installed versions of "flash-attn-4" and "triton"; absent ones are left out."""

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """The machine that `device` belongs to."""
        versions = {package: installed(package) for package in ("flash-attn-4", "triton")}
        return cls(
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            versions={package: found for package, found in versions.items() if found is not None},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A kernel and why."""

    kernel: AttentionKernel
    """Name of the module in `harts/layers/tree_attention`."""
    reason: str
    """One sentence for logs."""


def choose_kernel(needs: AttentionNeeds, machine: Machine, *, asked: str | None = None) -> Choice:
    """The fastest kernel that can run, or the one asked for.

    Windows and attention sinks are no reason: every kernel has them.

    Args:
        needs: Of the model.
        machine: Where it runs.
        asked: A name from `ATTENTION_KERNELS` if the caller wants that one and no other.

    Raises:
        ValueError: If the kernel asked for does not exist or cannot run; the message names the fix.

    Example:
        >>> needs = AttentionNeeds(dtype=torch.bfloat16, head_width=128, value_width=128, grouped=True)
        >>> choose_kernel(needs, Machine(device_type="cpu", capability=None, versions={})).kernel
        'sdpa'
    """
    obstacles: dict[AttentionKernel, str | None] = {
        "flash4": _against_flash4(needs, machine),
        "flex": _against_flex(needs, machine),
        "sdpa": None,
    }
    if asked is not None:
        names: tuple[str, ...] = ATTENTION_KERNELS
        if asked not in names:
            raise ValueError(f"There is no attention kernel {asked!r}; expected one of {', '.join(ATTENTION_KERNELS)}.")
        named = ATTENTION_KERNELS[names.index(asked)]
        if obstacle := obstacles[named]:
            raise ValueError(f"The attention kernel {asked!r} was asked for but cannot run: {obstacle}")
        return Choice(kernel=named, reason="asked for")
    if needs.deterministic and obstacles["flex"] is None:
        return Choice(kernel="flex", reason="adds up gradients in a fixed order without visiting every block")
    able: list[AttentionKernel] = [kernel for kernel in ATTENTION_KERNELS if obstacles[kernel] is None]
    passed = [f"not {name}: {obstacles[name]}" for name in ATTENTION_KERNELS[: ATTENTION_KERNELS.index(able[0])]]
    return Choice(kernel=able[0], reason=" ".join(passed) or "the fastest")


def flash4_widths(head_width: int, value_width: int) -> str | None:
    """Why FlashAttention-4 does not take these head widths, None if it does."""
    if head_width in (64, 128, 192, 256) and value_width % 8 == 0 and 64 <= value_width <= head_width:
        return None
    # Heads of 8 and 16 have right outputs and wrong gradients (benchmarks/reports/layers.md).
    return (
        f"FlashAttention-4 is checked on trees for keys of 64, 128, 192 and 256 channels and values of 64 up to those "
        f"of keys, not for head widths {head_width} (keys) and {value_width} (values)."
    )


def _against_flash4(needs: AttentionNeeds, machine: Machine) -> str | None:
    if machine.capability is None or machine.capability[0] != 9:
        return f"it is tuned for Hopper (compute capability 9), and this is {_name(machine)}. Use a Hopper GPU."
    found = machine.versions.get("flash-attn-4")
    if found != FLASH_ATTENTION_VERSION:
        return (
            f"it needs flash-attn-4 {FLASH_ATTENTION_VERSION}, and {found or 'none'} is installed. "
            f"Run `pip install flash-attn-4=={FLASH_ATTENTION_VERSION}`."
        )
    if needs.dtype not in HALF:
        return f"it computes in bfloat16 or float16, and the layers are {needs.dtype}. Convert the model."
    if needs.grouped and needs.head_width != needs.value_width:
        return (
            f"its backward pass takes grouped queries only with keys as wide as values, not {needs.head_width} and "
            f"{needs.value_width}. Repeat the keys for every query head."
        )
    return flash4_widths(needs.head_width, needs.value_width)


def _against_flex(needs: AttentionNeeds, machine: Machine) -> str | None:
    if needs.exact:
        return "its bits depend on the tree. Leave out exact."
    if machine.capability is None:
        return f"FlexAttention has a backward pass on GPUs only, and this is {_name(machine)}. Use a GPU."
    if machine.capability < (8, 0):
        return f"Triton's matrix products need compute capability 8.0, and this is {_name(machine)}. Use a newer GPU."
    if "triton" not in machine.versions:
        return "it is compiled with Triton, which is not installed. Run `pip install triton`."
    if needs.dtype not in (*HALF, torch.float32):
        return f"it computes in float32, bfloat16 or float16, and the layers are {needs.dtype}. Convert the model."
    if min(needs.head_width, needs.value_width) < 16:
        return f"it needs heads of width 16 or more, not {needs.head_width} and {needs.value_width}."
    return None


def _name(machine: Machine) -> str:
    if machine.capability is None:
        return f'device "{machine.device_type}"'
    return f"compute capability {machine.capability[0]}.{machine.capability[1]}"
