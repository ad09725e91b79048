"""From the hashes of all ranks' blocks to what has to be looked at: pure functions that every rank runs alike.

Blocks of several ranks with equal hashes are one *node*. A node's *items* are what follows it: further blocks, and the
*tails*, fewer than 64 tokens, of trajectories that have no further full block. Where all items of a node are on one
rank, that rank's own order tells how they sort; where they are on several, one of them gets the others' and sorts them
(`plan_resolution`). And where several ranks hold a node, its tokens go from holder to holder and are compared
(`plan_checks`).

`N` is over the trajectories of all ranks, rank after rank, each rank's in lexicographic order; `B` over their blocks;
`G` over nodes, one more for the root in front of all blocks; `I` over items.
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
    """The blocks of all ranks, merged where hashes are equal."""

    entry_B: NDArray[np.int64]
    """[B] int64. Trajectory, as a place in `ListedTrajectories`, that each block was cut from."""
    rank_B: NDArray[np.int64]
    """[B] int64. Its rank."""
    depth_B: NDArray[np.int64]
    """[B] int64. Full blocks before it."""
    node_B: NDArray[np.int64]
    """[B] int64. Its node."""
    above_B: NDArray[np.int64]
    """[B] int64. Node that it follows."""
    first_G: NDArray[np.int64]
    """[G - 1] int64. Block of the lowest rank that holds each node, the root excepted."""
    holders_G: NDArray[np.int64]
    """[G] int64. Ranks that hold each node; the root is last."""
    depth_G: NDArray[np.int64]
    """[G] int64. Blocks of the path that ends with each; 0 for the root."""
    before_C: NDArray[np.int64]
    """[C] int64. Blocks whose tokens must equal those of `after_C`: each node's holders, one after the next."""
    after_C: NDArray[np.int64]
    """[C] int64."""
    tail_node_N: NDArray[np.int64]
    """[N] int64. Node that the tail of each trajectory follows."""

    @property
    def root(self) -> int:
        """Its number."""
        return self.first_G.size


def match_blocks(listed: ListedTrajectories, hashes: NDArray[np.uint64]) -> BlockTrie | None:
    """Merge blocks with equal hashes.

    Args:
        listed: All trajectories.
        hashes: [B, 2] uint64. Chained hashes of the blocks that `cut_blocks` cuts from them.

    Returns:
        None if hashes are seen to collide: blocks of one rank, or blocks that follow different ones, have the same.
    """
    entry_B, depth_B, parent_B, tail_N = cut_blocks(listed.length_N, listed.lcp_N)
    rank_B = listed.rank_N[entry_B]
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: of equals, the lowest rank first
    starts = np.ones(order.size, dtype=bool)
    before, after = order[:-1], order[1:]
    starts[1:] = (hashes[before] != hashes[after]).any(axis=1)
    node_B = np.empty(order.size, dtype=np.int64)
    node_B[order] = np.cumsum(starts) - 1
    first_G = order[starts]
    root = first_G.size
    above_B = np.where(parent_B >= 0, node_B[parent_B], root) if parent_B.size else parent_B
    before, after = before[~starts[1:]], after[~starts[1:]]
    if (rank_B[before] == rank_B[after]).any() or (above_B[before] != above_B[after]).any():
        return None
    return BlockTrie(
        entry_B=entry_B,
        rank_B=rank_B,
        depth_B=depth_B,
        node_B=node_B,
        above_B=above_B,
        first_G=first_G,
        holders_G=np.append(np.bincount(node_B, minlength=root), np.unique(listed.rank_N).size),
        depth_G=np.append(depth_B[first_G] + 1, 0),
        before_C=before,
        after_C=after,
        tail_node_N=np.where(tail_N >= 0, node_B[tail_N], root) if node_B.size else np.full_like(tail_N, root),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """What follows each node."""

    node_I: NDArray[np.int64]
    """[I] int64. Node that each item follows."""
    child_I: NDArray[np.int64]
    """[I] int64. Node of the block that the item is; -1 for a tail."""
    entry_I: NDArray[np.int64]
    """[I] int64. First trajectory with the item, on the lowest rank that has it."""
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
    tail_entry = np.flatnonzero(~listed.repeats_N)
    node_I = np.concatenate([trie.above_B[trie.first_G], trie.tail_node_N[tail_entry]])
    entry_I = np.concatenate([trie.entry_B[trie.first_G], tail_entry])
    return Items(
        node_I=node_I,
        child_I=np.concatenate([np.arange(trie.root), np.full(tail_entry.size, -1)]),
        entry_I=entry_I,
        position_I=entry_I,
        lcp_I=listed.lcp_N[entry_I] - BLOCK_TOKENS * trie.depth_G[node_I],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """Consecutive tokens of trajectories, and the rank that is to see each piece."""

    holder_Q: NDArray[np.int64]
    """[Q] int64. Rank that has it."""
    reader_Q: NDArray[np.int64]
    """[Q] int64. Rank that is to see it; may be the holder."""
    entry_Q: NDArray[np.int64]
    """[Q] int64. Trajectory of the holder."""
    begin_Q: NDArray[np.int64]
    """[Q] int64. Depth of the first token."""
    size_Q: NDArray[np.int64]
    """[Q] int64, 0 to 64. Tokens."""

    def between(self, holder: int, reader: int) -> NDArray[np.int64]:
        """Which pieces one rank shows another, in order."""
        return np.flatnonzero((self.holder_Q == holder) & (self.reader_Q == reader))

    def tokens(self, holder: int, reader: int) -> int:
        """How many tokens one rank shows another."""
        return int(self.size_Q[self.between(holder, reader)].sum())

    def that_concern(self, rank: int) -> Pieces:
        """Those that a rank has or reads."""
        return self.take(np.flatnonzero((self.holder_Q == rank) | (self.reader_Q == rank)))

    def take(self, which: NDArray[np.int64]) -> Pieces:
        """Some of the pieces."""
        return Pieces(
            holder_Q=self.holder_Q[which],
            reader_Q=self.reader_Q[which],
            entry_Q=self.entry_Q[which],
            begin_Q=self.begin_Q[which],
            size_Q=self.size_Q[which],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resolution:
    """Items whose order no rank knows by itself: where their tokens are, and which rank sorts them. `Q` is over them,
    those of one node after the other."""

    item_Q: NDArray[np.int64]
    """[Q] int64. Which of `Items`."""
    node_Q: NDArray[np.int64]
    """[Q] int64, ascending. Node that each follows."""
    pieces: Pieces
    """Its tokens. The reader sorts it among its siblings: the rank with the most of them, so that few travel."""

    def read_by(self, rank: int) -> Resolution:
        """The items that a rank sorts."""
        which = np.flatnonzero(self.pieces.reader_Q == rank)
        return Resolution(
            item_Q=self.item_Q[which],
            node_Q=self.node_Q[which],
            pieces=self.pieces.take(which),
        )


def plan_resolution(trie: BlockTrie, items: Items, listed: ListedTrajectories) -> Resolution:
    """Decide which ranks sort what; every rank decides alike."""
    num_ranks = int(listed.rank_N[-1]) + 1 if listed.rank_N.size else 1
    open_G = (trie.holders_G > 1) & (np.bincount(items.node_I, minlength=trie.root + 1) > 1)
    reader_G = _most_items(trie, items, listed, open_G, num_ranks)
    source_G = trie.first_G.copy()
    here_B = open_G[trie.above_B] & (reader_G[trie.above_B] == trie.rank_B)
    source_G[trie.node_B[here_B]] = np.flatnonzero(here_B)  # nothing travels if the reader has it

    item_Q = np.flatnonzero(open_G[items.node_I])
    item_Q = item_Q[np.argsort(items.node_I[item_Q], kind="stable")]
    node_Q, is_block = items.node_I[item_Q], items.child_I[item_Q] >= 0
    entry_Q = items.entry_I[item_Q]
    entry_Q[is_block] = trie.entry_B[source_G[items.child_I[item_Q[is_block]]]]
    begin_Q = BLOCK_TOKENS * trie.depth_G[node_Q]
    pieces = Pieces(
        holder_Q=listed.rank_N[entry_Q],
        reader_Q=reader_G[node_Q],
        entry_Q=entry_Q,
        begin_Q=begin_Q,
        size_Q=np.where(is_block, BLOCK_TOKENS, listed.length_N[entry_Q] - begin_Q),
    )
    return Resolution(item_Q=item_Q, node_Q=node_Q, pieces=pieces)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checks:
    """Blocks whose hashes are equal on several ranks, piece by piece."""

    shown: Pieces
    """Tokens of one holder, read by the next."""
    compared: Pieces
    """The next holder's own, which must equal them."""

    def that_concern(self, rank: int) -> Checks:
        """Those of which a rank has either side."""
        which = np.flatnonzero((self.shown.holder_Q == rank) | (self.shown.reader_Q == rank))
        return Checks(shown=self.shown.take(which), compared=self.compared.take(which))


def plan_checks(trie: BlockTrie) -> Checks:
    """Every block goes along the chain of its holders, so that no rank sends or gets one twice."""
    shown, compared = (
        Pieces(
            holder_Q=trie.rank_B[block_C],
            reader_Q=trie.rank_B[trie.after_C],
            entry_Q=trie.entry_B[block_C],
            begin_Q=BLOCK_TOKENS * trie.depth_B[block_C],
            size_Q=np.full_like(block_C, BLOCK_TOKENS),
        )
        for block_C in (trie.before_C, trie.after_C)
    )
    return Checks(shown=shown, compared=compared)


def _most_items(
    trie: BlockTrie, items: Items, listed: ListedTrajectories, open_G: NDArray[np.bool_], num_ranks: int
) -> NDArray[np.int64]:
    """[G] int64. Of each open node the rank with the most items of its own, of equals the lowest; -1 elsewhere."""
    tail = items.child_I < 0
    node = np.concatenate([trie.above_B, items.node_I[tail]])
    rank = np.concatenate([trie.rank_B, listed.rank_N[items.entry_I[tail]]])
    wanted = open_G[node]
    pair, count = np.unique(node[wanted] * num_ranks + rank[wanted], return_counts=True)
    node, rank = np.divmod(pair, num_ranks)
    order = np.lexsort((rank, -count, node))
    first = np.diff(node[order], prepend=-1) != 0
    reader_G = np.full(open_G.size, -1, dtype=np.int64)
    reader_G[node[order][first]] = rank[order][first]
    return reader_G
