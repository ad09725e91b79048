"""Chained 128-bit hashes of blocks of 64 tokens, compiled.

The hash of a block depends on all tokens before it too, so two trajectories share as many blocks as their hashes agree
in, and to compare them takes 16 bytes for 64 tokens. Hashes only suggest: what rests on one is compared token by token
(`across_ranks.py`). `B` is a dimension over blocks: those of a sorted list that the trajectory before does not share.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
"""Tokens of a block."""

# Odd constants with an even mix of bits: the golden ratio and fractional parts of square roots.
_MULTIPLY_1, _MULTIPLY_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xB5C0FBCFEC4D3B2F)
_FINISH_1, _FINISH_2 = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
_START_1, _START_2 = np.uint64(0x6A09E667F3BCC908), np.uint64(0xBB67AE8584CAA73B)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(29), np.uint64(32), np.uint64(31)


@numba.njit(cache=True)
def cut_blocks(length_N, lcp_N):
    """Full blocks of a list of sorted lists that the trajectory before does not share.

    Args:
        length_N: [N] int64, >= 0.
        lcp_N: [N] int64; 0 where a sorted list begins.

    Returns:
        `entry_B`, the trajectory; `depth_B`, full blocks before it; `parent_B`, the block before it on the path, -1 if
        it is the first; all [B] int64. `tail_N`, [N] int64: the last full block of each trajectory, -1 if none.
    """
    count = 0
    for i in range(length_N.size):
        count += length_N[i] // BLOCK_TOKENS - lcp_N[i] // BLOCK_TOKENS
    entry_B, depth_B, parent_B = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    tail_N = np.full(length_N.size, -1, dtype=np.int64)
    path = np.empty(length_N.max() // BLOCK_TOKENS + 1 if length_N.size else 0, dtype=np.int64)
    block = 0
    for i in range(length_N.size):
        last = length_N[i] // BLOCK_TOKENS
        for depth in range(lcp_N[i] // BLOCK_TOKENS, last):
            entry_B[block], depth_B[block] = i, depth
            parent_B[block] = path[depth - 1] if depth > 0 else -1
            path[depth] = block
            block += 1
        if last > 0:
            tail_N[i] = path[last - 1]
    return entry_B, depth_B, parent_B, tail_N


@numba.njit(cache=True)
def _mixed(one, two, value):
    """Both lanes after one more value; for a given state no two values give the same lane."""
    one = (one ^ value) * _MULTIPLY_1
    two = (two + value) * _MULTIPLY_2
    return one ^ (one >> _SHIFT_1), two ^ (two >> _SHIFT_2)


@numba.njit(cache=True)
def _finished(one, two):
    """Lanes that depend on both; no two pairs give the same pair."""
    one = (one ^ (two >> _SHIFT_3)) * _FINISH_1
    two = (two ^ (one >> _SHIFT_2)) * _FINISH_2
    return one ^ (one >> _SHIFT_2), two ^ (two >> _SHIFT_1)


@numba.njit(cache=True)
def block_digests(values_X: NDArray[np.integer], begin_B: NDArray[np.int64], size: int, seed: int):
    """[B, 2] uint64: of each block `values_X[begin_B[b] : begin_B[b] + size]`, by itself, for a seed."""
    digests = np.empty((begin_B.size, 2), dtype=np.uint64)
    for block in range(begin_B.size):
        one, two = _START_1 + np.uint64(seed), _START_2
        for place in range(begin_B[block], begin_B[block] + size):
            one, two = _mixed(one, two, np.uint64(values_X[place]))
        digests[block, 0], digests[block, 1] = _finished(one, two)
    return digests


@numba.njit(cache=True)
def chain_digests(digests: NDArray[np.uint64], parent_B: NDArray[np.int64], seed: int) -> NDArray[np.uint64]:
    """[B, 2] uint64: of each block and all before it on its path.

    Args:
        digests: [B, 2] uint64, of the blocks alone.
        parent_B: [B] int64, smaller than the block's own number; -1 for a first block.
        seed: Other seeds give other hashes.
    """
    chained = np.empty_like(digests)
    for block in range(parent_B.size):
        parent = parent_B[block]
        one, two = _START_2 + np.uint64(seed), _START_1
        if parent >= 0:
            one, two = chained[parent, 0], chained[parent, 1]
        one, two = _mixed(one, two, digests[block, 0])
        one, two = _mixed(one, two, digests[block, 1])
        chained[block, 0], chained[block, 1] = _finished(one, two)
    return chained
