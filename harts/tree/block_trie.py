"""What the ranks' trajectories have in common by the hashes of their blocks: pure functions that every rank runs alike.

A block that several ranks hold, by its hash, is a *node*; so is the root, in front of all first blocks. What follows a
node are its *items*: blocks, and the *tails*, fewer than 64 tokens, of trajectories that have no further full block.
An item that is no node is on one rank, and so are all trajectories that run through it, one after the other in that
rank's order. So nothing below it needs to be looked at, and most blocks of a step are there.

`N` is over the trajectories of all ranks, rank after rank, each rank's in lexicographic order; `B` over their blocks;
`G` over nodes; `I` over items; `M`, here, over the blocks that are items, once for each rank that has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harts.tree.block_hashes import BLOCK_TOKENS, cut_blocks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ListedTrajectories:
    """What every rank knows of all trajectories before any token is exchanged."""

    rank_N: NDArray[np.int64]
    """[N] int64, ascending. Rank that holds each."""
    number_N: NDArray[np.int64]
    """[N] int64. Trajectory number in the step."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 0. Tokens of each."""
    lcp_N: NDArray[np.int64]
    """[N] int64. Tokens shared with the one before on the same rank; 0 for a rank's first."""

    @property
    def repeats_N(self) -> NDArray[np.bool_]:
        """[N] bool. Whether each equals the one before on its rank."""
        same_rank_N = np.diff(self.rank_N, prepend=-1) == 0
        return same_rank_N & (self.lcp_N == self.length_N)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockTrie:
    """The nodes, and the blocks that follow them."""

    depth_G: NDArray[np.int64]
    """[G] int64. Blocks of the path that ends with each node; the first is the root, with 0."""
    holders_G: NDArray[np.int64]
    """[G] int64. Ranks that hold each."""
    node_I: NDArray[np.int64]
    """[I] int64. Node that each block follows."""
    child_I: NDArray[np.int64]
    """[I] int64. Node that it is, greater than the one before; -1 if only one rank holds it."""
    item_M: NDArray[np.int64]
    """[M] int64, ascending. Which of these blocks; for each the ranks ascend too."""
    entry_M: NDArray[np.int64]
    """[M] int64. First trajectory of the rank with it."""
    tail_node_N: NDArray[np.int64]
    """[N] int64. Node that the tail of each trajectory follows; -1 if it follows none."""


def match_blocks(listed: ListedTrajectories, hashes: NDArray[np.uint64]) -> BlockTrie | None:
    """Find the nodes, from the root down.

    Args:
        listed: All trajectories.
        hashes: [B, 2] uint64. Chained hashes of the blocks that `cut_blocks` cuts from them.

    Returns:
        None if hashes are seen to collide: blocks of one rank, or blocks that follow different ones, have the same.
    """
    entry_B, depth_B, parent_B, tail_N = cut_blocks(listed.length_N, listed.lcp_N)
    by_depth = np.argsort(depth_B, kind="stable")
    ends = np.cumsum(np.bincount(depth_B)).tolist() if depth_B.size else []
    node_B = np.full(depth_B.size + 1, -1)
    node_B[-1] = 0  # what has no block before it (-1) follows the root
    depths, holders = [0], [np.array([np.unique(listed.rank_N).size])]
    nodes, children, items, members = ([np.zeros(0, dtype=np.int64)] for _ in range(4))
    num_items, num_nodes = 0, 1
    for depth, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        block = by_depth[begin:end]
        block = block[node_B[parent_B[block]] >= 0]
        if block.size == 0:
            break
        # Stable, so of equals the lowest rank comes first.
        block = block[np.lexsort((hashes[block, 1], hashes[block, 0]))]
        above, rank = node_B[parent_B[block]], listed.rank_N[entry_B[block]]
        starts = np.append(True, (hashes[block[1:]] != hashes[block[:-1]]).any(axis=1))
        again = ~starts[1:]
        if (again & ((rank[1:] == rank[:-1]) | (above[1:] != above[:-1]))).any():
            return None
        item = np.cumsum(starts) - 1
        count = np.bincount(item)
        child = np.where(count > 1, num_nodes - 1 + np.cumsum(count > 1), -1)
        node_B[block] = child[item]
        nodes.append(above[starts])
        children.append(child)
        items.append(item + num_items)
        members.append(entry_B[block])
        holders.append(count[count > 1])
        depths += [depth + 1] * holders[-1].size
        num_items, num_nodes = num_items + count.size, len(depths)
    node_I, child_I, item_M, entry_M = (np.concatenate(parts) for parts in (nodes, children, items, members))
    return BlockTrie(
        depth_G=np.array(depths),
        holders_G=np.concatenate(holders),
        node_I=node_I,
        child_I=child_I,
        item_M=item_M,
        entry_M=entry_M,
        tail_node_N=node_B[tail_N],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """What follows each node: the blocks of a `BlockTrie`, then tails."""

    node_I: NDArray[np.int64]
    """[I] int64. Node that each item follows."""
    child_I: NDArray[np.int64]
    """[I] int64. Node that it is; -1 if only one rank holds it."""
    entry_I: NDArray[np.int64]
    """[I] int64. First trajectory with it, of the lowest rank that has it."""
    shared_I: NDArray[np.int64]
    """[I] int64. Tokens, from the root on, in which all trajectories with this block agree; -1 for a tail, which
    belongs to trajectories that are equal."""
    position_I: NDArray[np.int64]
    """[I] int64. Numbers that sort the items of each node."""
    lcp_I: NDArray[np.int64]
    """[I] int64. Tokens below the node that are shared with the item before it in that order."""

    def resolved(self, item_Q: NDArray[np.int64], lcp_Q: NDArray[np.int64]) -> Items:
        """The same items with positions and common prefixes of some, given in their order."""
        position_I, lcp_I = self.position_I.copy(), self.lcp_I.copy()
        position_I[item_Q], lcp_I[item_Q] = np.arange(item_Q.size), lcp_Q
        return replace(self, position_I=position_I, lcp_I=lcp_I)


def list_items(trie: BlockTrie, listed: ListedTrajectories) -> Items:
    """Blocks and tails below every node, sorted where one rank holds the node. Of trajectories of a rank that are
    equal, the first stands for all."""
    tail_entry = np.flatnonzero(~listed.repeats_N & (trie.tail_node_N >= 0))
    first_M = np.diff(trie.item_M, prepend=-1) > 0
    entry_I = np.concatenate([trie.entry_M[first_M], tail_entry])
    node_I = np.concatenate([trie.node_I, trie.tail_node_N[tail_entry]])
    depth_I = BLOCK_TOKENS * trie.depth_G[node_I]
    none = np.full(tail_entry.size, -1)
    return Items(
        node_I=node_I,
        child_I=np.concatenate([trie.child_I, none]),
        entry_I=entry_I,
        shared_I=np.concatenate([depth_I[: trie.node_I.size] + BLOCK_TOKENS, none]),
        position_I=entry_I,
        lcp_I=listed.lcp_N[entry_I] - depth_I,
    )
