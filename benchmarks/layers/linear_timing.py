"""Times of GPU work, and what a benchmark prints."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.evidence import markdown_table

Row = dict[str, object]


def medians(work: Mapping[str, Callable[[], object]], *, repeats: int = 15) -> dict[str, float]:
    """Median milliseconds of each, all taken in turns so that clocks and neighbours are the same for all."""
    for run in work.values():
        for _ in range(2):
            run()
    events = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def report(name: str, tables: Mapping[str, list[Row]], *, as_json: bool) -> None:
    """Print tables, or one line of JSON; and write that line into the folder that the variable OUT names, if set."""
    line = json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, **tables})
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / f"{name}.json").write_text(line + "\n", encoding="utf-8")
    if as_json:
        print(line)
        return
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}\n\n{markdown_table(rows)}")
