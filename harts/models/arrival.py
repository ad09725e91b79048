"""Does the layout arrive? A layer that is not handed it would run over packed neighbours without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def layout_must_arrive(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse calls of layers without a layout; transformers has models that drop keywords on the way to some.

    Args:
        layers: Those that read `harts_layout`.

    Raises:
        ValueError: From the call of a layer without `harts_layout` among its keywords.
    """

    def check(layer: nn.Module, _inputs: Any, keywords: dict[str, Any]) -> None:
        if keywords.get("harts_layout") is None:
            raise ValueError(
                f"{type(layer).__qualname__} was called without the layout: what calls it drops keywords. "
                "Give its caller a tree class in the family file, or install a newer transformers."
            )

    handles = [layer.register_forward_pre_hook(check, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
