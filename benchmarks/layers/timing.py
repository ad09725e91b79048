"""Times of what runs on a GPU, and what every table of them states."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.evidence import markdown_table

Row = dict[str, object]


def give_up_after(seconds: int) -> None:
    """End the process with an error if it is still there after so many seconds."""
    signal.alarm(seconds)


def milliseconds(run: Callable[[], object], *, repeats: int = 15) -> float:
    """Median time of one call on the current device, after three calls that are not counted."""
    for _ in range(3):
        run()
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))


def copy_bandwidth() -> float:
    """Bytes a second that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) * 1e-3)


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """`||actual - expected|| / ||expected||` in the dtype of what is expected; infinite if anything is not finite."""
    if not actual.isfinite().all():
        return float("inf")
    return ((actual.to(expected.dtype) - expected).norm() / expected.norm()).item()


def check(name: str, expected: Tensor, actual: Tensor, *, at_most: float) -> None:
    """End the program before anything is timed if a result is wrong."""
    error = relative_error(expected, actual)
    if not error <= at_most:
        raise SystemExit(f"{name}: relative error {error:.3e}, at most {at_most:.1e} expected. Nothing is timed.")


def report(name: str, rows: list[Row], *, as_json: bool) -> None:
    """Print a table, or JSON; write JSON to the folder that the variable OUT names, if it is set."""
    machine = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "fla-core", "liger-kernel"):
        try:
            machine[package] = version(package)
        except PackageNotFoundError:
            continue
    text = json.dumps({"benchmark": name, **machine, "rows": rows})
    print(text if as_json else f"{machine}\n\n{markdown_table(rows)}")
    if folder := os.environ.get("OUT"):
        Path(folder, f"{name}.json").write_text(text, encoding="utf-8")
