"""Which activations kernels compute by themselves."""

from __future__ import annotations

from typing import Literal

from torch import nn
from transformers.activations import SiLUActivation

Activation = Literal["silu", "none"]


def activation_of_kernel(activation: nn.Module) -> Activation:
    """What a kernel is asked to compute for a module: "silu", or "none" and the module is called afterwards.

    Example:
        >>> activation_of_kernel(nn.SiLU()), activation_of_kernel(nn.GELU())
        ('silu', 'none')
    """
    # transformers has a class of its own for the same function, and models have either.
    return "silu" if isinstance(activation, nn.SiLU | SiLUActivation) else "none"
