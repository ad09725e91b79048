"""fla's norms with one configuration for all sizes.

fla measures launch shapes of its norms anew for every 65,536 rows more, and the number of warps decides the order in
which a row is summed. Its other kernels are measured by widths and chunk size only, so what they do to a row does not
change within a process.

Imported only where fla is installed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from fla.modules.norm import fused_norm_gate, l2norm, layernorm
from triton.runtime.autotuner import Autotuner, Heuristics

MODULES = (l2norm, fused_norm_gate, layernorm)
BY_ROWS = "NB"
"""fla's name of the number of rows, in units, among the sizes that a launch shape is measured for."""


@contextmanager
def one_configuration() -> Iterator[None]:
    """Launch fla's norms with the first of their configurations, whatever the number of rows."""
    measured = [(tuner, tuner.configs) for module in MODULES for tuner in tuners_by_rows(module)]
    try:
        for tuner, configs in measured:
            tuner.configs = configs[:1]
        yield
    finally:
        for tuner, configs in measured:
            tuner.configs = configs


def tuners_by_rows(module: ModuleType) -> Iterator[Autotuner]:
    """The kernels of a module of fla whose launch shape depends on the number of rows."""
    for kernel in vars(module).values():
        tuner = kernel.fn if isinstance(kernel, Heuristics) else kernel
        if isinstance(tuner, Autotuner) and BY_ROWS in tuner.keys:
            yield tuner
