"""In which round each run goes: the fewest rounds, and among schedules that need no more, a short critical path.

A call of a kernel takes as long as its longest run, so rounds cost the sum of their longest runs. The earliest round
of each run often wastes that: a long side branch that could run beside the trunk's longest run runs beside a short
one instead. Which schedule is shortest depends on the tree, so three kinds are compared: earliest, latest, and those
of a descent (`harts/layout/descent.py`) started from both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def schedule(parent: NDArray[np.int64], chunks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give runs their rounds.

    Args:
        parent: [runs] int64. Run whose final state each run starts from, smaller than its own number; -1 for none.
        chunks: [runs] int64, >= 1. Chunks of each run.

    Returns:
        [runs] int64. Rounds from 0, each larger than the parent's, as few as the longest line of descent has runs. Of
        the earliest, the latest and the descents' rounds, the first with the least critical path. Time and memory are
        linear in the runs.

    Example (a trunk of runs 0, 1 and 3 with a side branch 2; the branch waits for the trunk's longest run):
        >>> schedule(np.array([-1, 0, 0, 1]), np.array([1, 1, 9, 9])).tolist()
        [0, 1, 2, 2]
    """
    earliest = earliest_rounds(parent)
    latest = latest_rounds(parent, int(earliest.max()) + 1)
    best, length = earliest, critical_path(earliest, chunks)
    if (other := critical_path(latest, chunks)) < length:
        best, length = latest, other
    shortest = _longest_line(parent, chunks)
    for start in (earliest, latest):
        if length == shortest:  # no schedule undercuts a line of descent
            break
        # Compiled on first use: importing harts does not import numba.
        from harts.layout.descent import descend

        rounds = descend(parent, chunks, start=start, latest=latest)
        if (other := critical_path(rounds, chunks)) < length:
            best, length = rounds, other
    return best


def critical_path(round_of_run: NDArray[np.int64], chunks: NDArray[np.int64]) -> int:
    """Sum over rounds of the chunks of the longest run."""
    longest = np.zeros(round_of_run.max() + 1, dtype=np.int64)
    np.maximum.at(longest, round_of_run, chunks)
    return int(longest.sum())


def earliest_rounds(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """As soon as the parent's state is there."""
    rounds: list[int] = []
    for above in parent.tolist():
        rounds.append(rounds[above] + 1 if above >= 0 else 0)
    return np.array(rounds, dtype=np.int64)


def latest_rounds(parent: NDArray[np.int64], num_rounds: int) -> NDArray[np.int64]:
    """As late as the runs that follow allow."""
    above = parent.tolist()
    rounds = [num_rounds - 1] * len(above)
    for run in range(len(above) - 1, -1, -1):
        if above[run] >= 0:
            rounds[above[run]] = min(rounds[above[run]], rounds[run] - 1)
    return np.array(rounds, dtype=np.int64)


def _longest_line(parent: NDArray[np.int64], chunks: NDArray[np.int64]) -> int:
    """Chunks of the longest line of descent."""
    reached: list[int] = []
    for above, count in zip(parent.tolist(), chunks.tolist(), strict=True):
        reached.append(count + (reached[above] if above >= 0 else 0))
    return max(reached)
