"""transformers' layers as transformers writes them, without the libraries that it binds to them where installed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType

from torch import nn


@contextmanager
def own_layers(model: nn.Module) -> Iterator[None]:
    """While it lasts, layers of a model compute in PyTorch what they would ask fla, mamba-ssm or causal-conv1d for.

    transformers puts a library's function in place of its own at import, whatever the device and dtype of the tensors
    that come later; those functions know neither float64 nor the CPU. The functions of the modeling files are swapped
    for the ones that they wrap, and put back.
    """
    modules = {
        sys.modules[type(m).__module__] for m in model.modules() if type(m).__module__.startswith("transformers.")
    }
    swapped = []
    for module in modules:
        for name, function in vars(module).items():
            own = inspect.unwrap(function) if isinstance(function, FunctionType) else function
            if own is not function and own.__module__ == module.__name__:
                swapped.append((module, name, function, own))
    try:
        for module, name, _, own in swapped:
            setattr(module, name, own)
        yield
    finally:
        for module, name, function, _ in swapped:
            setattr(module, name, function)
