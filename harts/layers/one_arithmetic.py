"""Exact mode: what runs a forward pass so that a row's bits do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from harts.layers.capability import installed
from harts.layers.row_blocks import row_blocks


@contextmanager
def one_arithmetic(device: torch.device) -> Iterator[None]:
    """Operators in blocks of one size, and on a GPU fla's norms with one configuration for all sizes.

    Args:
        device: Where the model is.
    """
    with ExitStack() as stack:
        if device.type == "cuda" and installed("fla-core") is not None:
            from harts.layers.linear_attention.fla_norms import one_configuration

            stack.enter_context(one_configuration())
        stack.enter_context(row_blocks())
        yield
