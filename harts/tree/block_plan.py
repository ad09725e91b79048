"""Whose tokens are looked at by whom: pure functions that every rank runs alike, so that no rank has to ask.

Items of a node that several ranks hold are sorted by one of them. A node itself goes from holder to holder, and each
compares its tokens with its own. `Q` is over the pieces of trajectories that this takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.tree.block_hashes import BLOCK_TOKENS
from harts.tree.block_trie import BlockTrie, Items, ListedTrajectories


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
    """Decide which ranks sort what."""
    num_blocks = trie.node_I.size
    open_G = (trie.holders_G > 1) & (np.bincount(items.node_I, minlength=trie.depth_G.size) > 1)
    reader_G = _most_items(trie, items, listed, open_G)
    source_I = items.entry_I.copy()
    here_M = listed.rank_N[trie.entry_M] == reader_G[trie.node_I[trie.item_M]]
    source_I[trie.item_M[here_M]] = trie.entry_M[here_M]  # nothing travels if the reader has it

    item_Q = np.flatnonzero(open_G[items.node_I])
    item_Q = item_Q[np.argsort(items.node_I[item_Q], kind="stable")]
    node_Q, entry_Q = items.node_I[item_Q], source_I[item_Q]
    begin_Q = BLOCK_TOKENS * trie.depth_G[node_Q]
    pieces = Pieces(
        holder_Q=listed.rank_N[entry_Q],
        reader_Q=reader_G[node_Q],
        entry_Q=entry_Q,
        begin_Q=begin_Q,
        size_Q=np.where(item_Q < num_blocks, BLOCK_TOKENS, listed.length_N[entry_Q] - begin_Q),
    )
    return Resolution(item_Q=item_Q, node_Q=node_Q, pieces=pieces)


def _most_items(
    trie: BlockTrie, items: Items, listed: ListedTrajectories, open_G: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """[G] int64. Of each open node the rank with the most items of its own, of equals the lowest; -1 elsewhere."""
    num_ranks = int(listed.rank_N.max(initial=0)) + 1
    node = np.concatenate([trie.node_I[trie.item_M], items.node_I[trie.node_I.size :]])
    rank = listed.rank_N[np.concatenate([trie.entry_M, items.entry_I[trie.node_I.size :]])]
    wanted = open_G[node]
    pair, count = np.unique(node[wanted] * num_ranks + rank[wanted], return_counts=True)
    node, rank = np.divmod(pair, num_ranks)
    order = np.lexsort((rank, -count, node))
    first = np.diff(node[order], prepend=-1) != 0
    reader_G = np.full(open_G.size, -1, dtype=np.int64)
    reader_G[node[order][first]] = rank[order][first]
    return reader_G


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


def plan_checks(trie: BlockTrie, listed: ListedTrajectories) -> Checks:
    """Every node goes along the chain of its holders, so that no rank sends or gets one twice."""
    before = np.flatnonzero(np.diff(trie.item_M) == 0)
    begin_Q = BLOCK_TOKENS * trie.depth_G[trie.node_I[trie.item_M[before]]]
    shown, compared = (
        Pieces(
            holder_Q=listed.rank_N[entry_Q],
            reader_Q=listed.rank_N[trie.entry_M[before + 1]],
            entry_Q=entry_Q,
            begin_Q=begin_Q,
            size_Q=np.full_like(before, BLOCK_TOKENS),
        )
        for entry_Q in (trie.entry_M[before], trie.entry_M[before + 1])
    )
    return Checks(shown=shown, compared=compared)
