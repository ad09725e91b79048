"""What every report states: command, commit, hardware."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

REPORTS = Path(__file__).parent / "reports"
_CHANGES = ("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/reports")
"""Reports are written while measuring."""


def report_file(name: str) -> Path:
    """Where a report or its chart is written."""
    REPORTS.mkdir(exist_ok=True)
    return REPORTS / name


def provenance() -> dict[str, str]:
    """Command, commit, hardware, versions."""
    return {
        # Of paths the name alone: where they lie says something about one machine only.
        "command": " ".join(["python -m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_short, sys.argv[1:])]),
        "commit": _git("rev-parse", "--short", "HEAD") + (" with changes" if _git(*_CHANGES) else ""),
        "hardware": f"{_processor()}, {platform.machine()}, one core; other jobs beside it",
        "python": platform.python_version(),
    }


def markdown_table(rows: list[dict[str, object]]) -> str:
    """A table with the keys of the first row as its head."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in head) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _short(argument: str) -> str:
    return Path(argument).name if Path(argument).exists() else argument


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or "unknown processor"
    names = [line.split(":")[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown processor"
