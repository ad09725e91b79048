"""What a layer's definition gives, to compare executions with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def derived(output: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
    """An output without its graph, random upstream gradients, and those of the leaves."""
    upstream = torch.randn_like(output)
    return output.detach(), upstream, torch.autograd.grad(output, leaves, upstream)
