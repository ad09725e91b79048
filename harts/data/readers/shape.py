"""Tree shapes without tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupShape:
    """The trajectories of one task, in lexicographic order of their tokens.

    Example (`abc`, `abcde`, `abcz`, `abxy`): length_N [3, 5, 4, 4], lcp_N [0, 3, 3, 2].
    """

    name: str
    """What the file calls it; empty if it does not."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 1. Tokens of each."""
    lcp_N: NDArray[np.int64]
    """[N] int64. Tokens shared with the one before; 0 for the first."""
    loss_spans: tuple[tuple[tuple[int, int], ...], ...]
    """For each trajectory the half-open [begin, end) spans of trained positions."""
