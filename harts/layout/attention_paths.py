"""Every path of a tree with its keys one after the other, for attention that is bit-equal to each trajectory alone.

Packed tokens are cut where a path ends: what lies between two leaves is new and is the end of the second leaf's path.
So queries stay where they are, each belongs to the path of the next leaf, and only keys are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionPaths:
    """Root-to-leaf paths as sequences of a kernel for sequences of different lengths.

    Example (`abcde`, `abxy`, `abcz`, `abc`: tokens a b c d e z x y): `key_index` is `abcde` `abcz` `abxy`,
    `query_ends` [0 5 6 8], `key_ends` [0 5 9 13].
    """

    key_index: Tensor
    """[sum of path lengths] int64. Packed tokens of one path after the other."""
    query_ends: Tensor
    """[paths + 1] int32, from 0. Packed token after the last one that each path adds to those before it."""
    key_ends: Tensor
    """[paths + 1] int32, from 0. Where each path ends in `key_index`."""
    most_queries: int
    """The most tokens that a path adds."""
    most_keys: int
    """Tokens of the longest path."""

    def to(self, device: torch.device) -> AttentionPaths:
        """The same on another device."""
        names = ("key_index", "query_ends", "key_ends")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def attention_paths(subtree_end_T: NDArray[np.int64], position_T: NDArray[np.int64]) -> AttentionPaths:
    """Walk the paths of a tree in pre-order.

    Args:
        subtree_end_T: [T] int64, one past the last descendant of each token.
        position_T: [T] int64, depth of each token.
    """
    leaves = np.flatnonzero(subtree_end_T == np.arange(1, subtree_end_T.size + 1))
    begins = np.concatenate([[0], leaves[:-1] + 1])
    lengths = position_T[leaves] + 1
    path = np.empty(lengths.max(), dtype=np.int64)
    key_index = np.empty(lengths.sum(), dtype=np.int64)
    key_ends = np.concatenate([[0], np.cumsum(lengths)])
    for number, (begin, leaf) in enumerate(zip(begins, leaves, strict=True)):
        path[position_T[begin] : position_T[leaf] + 1] = np.arange(begin, leaf + 1)
        key_index[key_ends[number] : key_ends[number + 1]] = path[: lengths[number]]
    return AttentionPaths(
        key_index=torch.from_numpy(key_index),
        query_ends=torch.from_numpy(np.concatenate([[0], leaves + 1]).astype(np.int32)),
        key_ends=torch.from_numpy(key_ends.astype(np.int32)),
        most_queries=int((leaves + 1 - begins).max()),
        most_keys=int(lengths.max()),
    )
