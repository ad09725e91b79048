"""Which activations kernels compute by themselves."""

from __future__ import annotations

from typing import Literal

from torch import nn
from transformers.activations import SiLUActivation

from harts.layers.capability import importable

Activation = Literal["silu", "rounded silu", "none"]
"""What follows in the same kernel, in float32; "rounded silu" is that of its argument as PyTorch stores it between."""


def activation_of_kernel(activation: nn.Module) -> Activation:
    """What a kernel is asked to compute for a module: "silu", or "none" and the module is called afterwards.

    Example:
        >>> activation_of_kernel(nn.SiLU()), activation_of_kernel(nn.GELU())
        ('silu', 'none')
    """
    # transformers has a class of its own for the same function, and models have either.
    return "silu" if isinstance(activation, nn.SiLU | SiLUActivation) else "none"


def silu_after_convolution() -> Activation:
    """SiLU as it follows the short convolution of a trajectory alone.

    transformers calls causal-conv1d where that is installed, whose kernel rounds once; without it, PyTorch rounds what
    the convolution gives and then its activation.
    """
    return "silu" if importable("causal_conv1d") else "rounded silu"
