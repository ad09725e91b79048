"""Which kernels run a microbatch: what a user may ask for, carried by the layout to every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

AttentionKernel = Literal["flash4", "flex", "sdpa"]
LinearKernel = Literal["fla", "torch"]
ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)
LINEAR_KERNELS: tuple[LinearKernel, ...] = get_args(LinearKernel)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """None leaves a choice to the layer: the fastest that can run its tensors where they are.

    Example:
        >>> Kernels(attention="sdpa").linear_attention is None
        True
    """

    attention: AttentionKernel | None = None
    """FlashAttention-4, FlexAttention, or PyTorch's SDPA block by block."""
    linear_attention: LinearKernel | None = None
    """fla with the tree's states in one launch, or plain PyTorch; short convolutions and row gathers go along."""
    deterministic: bool = False
    """Whether two runs must give equal gradients, bit for bit, on a GPU too."""
    exact: bool = False
    """Whether log-probs on trees and flat must be equal, bit for bit. Slow, for checking (docs/exactness.md)."""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ValueError: If a kernel does not exist, or one was asked for that has no exact form.
        """
        for kind, asked, known in (
            ("attention", self.attention, ATTENTION_KERNELS),
            ("linear_attention", self.linear_attention, LINEAR_KERNELS),
        ):
            if asked is not None and asked not in known:
                raise ValueError(f"There is no {kind} kernel {asked!r}. Choose one of {', '.join(known)}, or None.")
        if self.exact and self.attention == "flex":
            raise ValueError(
                'FlexAttention has no exact form. Use "flash4" or "sdpa", or None for the fastest that has one.'
            )
