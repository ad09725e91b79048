"""The order of all trajectories from the order of what follows each node: one walk in pre-order, compiled."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from harts.tree.block_hashes import BLOCK_TOKENS
from harts.tree.block_trie import BlockTrie, Items, ListedTrajectories


def order_trajectories(
    trie: BlockTrie, items: Items, listed: ListedTrajectories
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort the trajectories of all ranks.

    Args:
        trie: Of their blocks.
        items: Of all its nodes, sorted.
        listed: The trajectories.

    Returns:
        `entry_N`, [N] int64: places in `listed`, in lexicographic order; equal trajectories by number. `lcp_N`, [N]
        int64: tokens shared with the one before.
    """
    by_node = np.lexsort((items.position_I, items.node_I))
    begin_G = np.searchsorted(items.node_I[by_node], np.arange(trie.root + 2))
    entry_N, lcp_N = _walk(
        begin_G,
        trie.depth_G * BLOCK_TOKENS,
        (items.child_I[by_node], items.entry_I[by_node], items.lcp_I[by_node]),
        listed.length_N,
        listed.repeats_N,
    )
    length_N = listed.length_N[entry_N]
    equal_N = (lcp_N == length_N) & (np.roll(length_N, 1) == length_N)
    run_N = np.cumsum(~equal_N)
    return entry_N[np.lexsort((listed.number_N[entry_N], run_N))], lcp_N


@numba.njit(cache=True)
def _walk(begin_G, depth_G, items, length_N, repeats_N):
    """Trajectories in pre-order, the root's number being the largest."""
    child_I, entry_I, shared_I = items
    entry_N, lcp_N = np.empty(length_N.size, dtype=np.int64), np.zeros(length_N.size, dtype=np.int64)
    path, next_item = np.empty(begin_G.size, dtype=np.int64), begin_G.copy()
    path[0] = begin_G.size - 2
    deepest, out, shared = 0, 0, 0
    while deepest >= 0:
        node = path[deepest]
        item = next_item[node]
        if item == begin_G[node + 1]:
            deepest -= 1
            continue
        next_item[node] += 1
        if item > begin_G[node]:
            shared = depth_G[node] + shared_I[item]
        if child_I[item] >= 0:
            deepest += 1
            path[deepest] = child_I[item]
            continue
        entry = entry_I[item]
        entry_N[out], lcp_N[out] = entry, shared
        out += 1
        while entry + 1 < length_N.size and repeats_N[entry + 1]:
            entry += 1
            entry_N[out], lcp_N[out] = entry, length_N[entry]
            out += 1
    return entry_N[:out], lcp_N[:out]
