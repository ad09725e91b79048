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
    begin_G = np.searchsorted(items.node_I[by_node], np.arange(trie.depth_G.size + 1))
    columns = (items.child_I, items.entry_I, items.shared_I, items.lcp_I)
    entry_N, lcp_N = _walk(
        begin_G,
        trie.depth_G * BLOCK_TOKENS,
        tuple(column[by_node] for column in columns),
        (listed.length_N, listed.lcp_N, listed.repeats_N),
    )
    length_N = listed.length_N[entry_N]
    equal_N = (lcp_N == length_N) & (np.roll(length_N, 1) == length_N)
    run_N = np.cumsum(~equal_N)
    return entry_N[np.lexsort((listed.number_N[entry_N], run_N))], lcp_N


@numba.njit(cache=True)
def _walk(begin_G, depth_G, items, listed):
    """Trajectories in pre-order."""
    child_I, entry_I, shared_I, lcp_I = items
    length_N, local_lcp_N, repeats_N = listed
    entry_N, lcp_N = np.empty(length_N.size, dtype=np.int64), np.zeros(length_N.size, dtype=np.int64)
    path, next_item = np.zeros(begin_G.size, dtype=np.int64), begin_G.copy()
    deepest, out, shared = 0, 0, 0
    while deepest >= 0:
        node = path[deepest]
        item = next_item[node]
        if item == begin_G[node + 1]:
            deepest -= 1
            continue
        next_item[node] += 1
        if item > begin_G[node]:
            shared = depth_G[node] + lcp_I[item]
        if child_I[item] >= 0:
            deepest += 1
            path[deepest] = child_I[item]
            continue
        entry = entry_I[item]
        entry_N[out], lcp_N[out] = entry, shared
        out, entry = out + 1, entry + 1
        while entry < length_N.size:
            if not (repeats_N[entry] if shared_I[item] < 0 else local_lcp_N[entry] >= shared_I[item]):
                break
            entry_N[out], lcp_N[out] = entry, local_lcp_N[entry]
            out, entry = out + 1, entry + 1
    return entry_N[:out], lcp_N[:out]
