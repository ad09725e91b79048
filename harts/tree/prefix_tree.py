"""The prefix tree of a step, as arrays over segments.

Built by sorting the trajectories and comparing neighbours: three arrays (order, length, longest common prefix
with the trajectory before) fix the whole tree. No Python object per token, no recursion. Roots need no common
token, so the tree may be a forest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixTree:
    """Trajectories merged where they start with the same tokens.

    `N` arrays are in lexicographic order of the trajectories (a prefix before what it begins); `S` arrays are in
    pre-order, so the packed tokens of a segment are contiguous and those of its descendants follow it. A segment
    ends where paths part or a trajectory ends, so the same trajectories run through all of its tokens.

    Example (the words abcde, abxy, abcz, abc in that order):
        order_N   [3, 0, 2, 1]      abc abcde abcz abxy
        length_N  [3, 5, 4, 4]
        lcp_N     [0, 3, 3, 2]
        segments  ab, c, de, z, xy  parent_S [-1, 0, 1, 1, 0]  start_S [0, 2, 3, 3, 2]  end_S [2, 3, 5, 4, 4]
        offset_S  [0, 2, 3, 5, 6]   multiplicity_S [4, 3, 1, 1, 1]  tail_N [1, 2, 3, 4]
    """

    order_N: NDArray[np.int64]
    """[N] int64. Trajectory number (place in the batch) of each; equal trajectories in batch order."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 1. Tokens of each."""
    lcp_N: NDArray[np.int64]
    """[N] int64. Tokens shared with the trajectory before; 0 for the first."""
    parent_S: NDArray[np.int64]
    """[S] int64. Segment above, smaller than the segment's own number; -1 for a root."""
    start_S: NDArray[np.int64]
    """[S] int64. Depth (path position) of the first token."""
    end_S: NDArray[np.int64]
    """[S] int64. One past the depth of the last token; > start."""
    offset_S: NDArray[np.int64]
    """[S] int64. Packed index of the first token."""
    multiplicity_S: NDArray[np.int64]
    """[S] int64, >= 1. Trajectories that contain the segment."""
    tail_N: NDArray[np.int64]
    """[N] int64. Segment that holds the last token of each trajectory."""

    @property
    def num_tokens(self) -> int:
        """T, the distinct tokens."""
        return int((self.length_N - self.lcp_N).sum())

    @property
    def num_trajectory_tokens(self) -> int:
        """F, the tokens of all trajectories."""
        return int(self.length_N.sum())
