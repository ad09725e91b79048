"""Key lists of query blocks for tree attention on a CPU.

In pre-order, the keys that any query of a block may see are the path to its first query plus the block itself, so a
block works on (path + block) keys however many branches lie between them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueryBlock:
    """Consecutive queries and every key one of them sees."""

    start: int
    """First query, packed index."""
    end: int
    """One past the last query."""
    keys: Tensor | slice
    """int64 packed indices, ascending; a slice where they are contiguous (nothing is copied then)."""
    first_position: int
    """Least position of the queries."""

    def keys_in_window(self, window: int | None) -> Tensor | slice:
        """The keys without those of the path that are out of every query's window.

        All blocks of T tokens keep O(T / block * (window + block)) keys together: of a path's keys one block keeps,
        beyond those in the window of its least position, only such whose subtree ends in it.

        Args:
            window: Positions that a query sees, its own included; None for all.
        """
        # Key `i` of the path has position `i`, so those too far above come first.
        skipped = 0 if window is None else max(0, self.first_position - window + 1)
        if isinstance(self.keys, slice):
            return slice(self.keys.start + skipped, self.keys.stop)
        return self.keys[skipped:]

    def to(self, device: torch.device) -> QueryBlock:
        """The same block with its key list on another device."""
        return self if isinstance(self.keys, slice) else replace(self, keys=self.keys.to(device))


def query_blocks(
    subtree_end_T: NDArray[np.int64],
    root_start_T: NDArray[np.int64],
    *,
    position_T: NDArray[np.int64],
    block_size: int,
) -> tuple[QueryBlock, ...]:
    """Cut the packed tokens into blocks of queries.

    Args:
        subtree_end_T: [T] int64, one past the last descendant of each token.
        root_start_T: [T] int64, first packed token of the tree that each token belongs to.
        position_T: [T] int64, depth of each token on its path.
        block_size: Queries of a block, >= 1.
    """
    blocks = []
    for start in range(0, subtree_end_T.size, block_size):
        end = min(start + block_size, subtree_end_T.size)
        first = int(root_start_T[start])
        keys = first + np.flatnonzero(subtree_end_T[first:end] > start)
        contiguous = keys.size == end - keys[0]
        blocks.append(
            QueryBlock(
                start=start,
                end=end,
                keys=slice(int(keys[0]), end) if contiguous else torch.from_numpy(keys),
                first_position=int(position_T[start:end].min()),
            )
        )
    return tuple(blocks)
