"""Several processes for one test."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import set_forkserver_preload

from torch.multiprocessing.spawn import start_processes


def run_in_processes(function: Callable[..., None], *arguments: object, count: int) -> None:
    """Call a function with the number of each of so many processes and these arguments; raises what one of them did."""
    set_forkserver_preload([function.__module__])  # one process imports, the others are copies of it
    start_processes(function, args=arguments, nprocs=count, start_method="forkserver")
