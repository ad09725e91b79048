"""The prefix tree of a step whose trajectories live on several ranks: the same arrays on each, without all tokens.

1. Every rank sorts its own trajectories and hashes the blocks of 64 tokens that they do not share with one another.
2. Ranks gather lengths, common prefixes and hashes. From these each knows what follows what, up to a block.
3. Where paths of several ranks part, one rank gets the blocks that differ, and sorts them by their tokens.
   Where several ranks hold a block with one hash, the tokens go from holder to holder and are compared: a hash is
   never trusted alone. If a comparison fails, all ranks start again with other hashes.
4. Ranks gather what was sorted, and each walks the tree to the order of all trajectories.

Order and common prefixes thus rest on comparisons of tokens only, each of which was made on one rank. Each rank
receives 16 bytes for every 64 tokens that are distinct on their rank; of its own distinct tokens at most one copy, and
only of those that another rank holds too; and at most 64 tokens for each item that it sorts, of which there are fewer
than two a trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.data.exchange import Exchange, raise_together
from harts.data.ragged import ranges
from harts.tree.block_hashes import BLOCK_TOKENS, block_digests, chain_digests, cut_blocks
from harts.tree.block_order import order_trajectories
from harts.tree.block_plan import Pieces, plan_checks, plan_resolution
from harts.tree.block_resolution import resolve
from harts.tree.block_trie import ListedTrajectories, list_items, match_blocks
from harts.tree.identities import FACTS, RowFormat, TokenIdentities, local_facts
from harts.tree.lcp import sort_tokens
from harts.tree.prefix_tree import PrefixTree, tree_from_lcp

TRIES = 4
"""Hash functions that are tried. With 128 bits not even the second is ever needed."""
BLOCKS_AT_ONCE = 4096
"""Blocks whose rows are written down at a time."""

Chain = Callable[[NDArray[np.uint64], NDArray[np.int64], int], NDArray[np.uint64]]
"""What `chain_digests` does."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SortedAcrossRanks:
    """The trajectories of all ranks in lexicographic order."""

    order_N: NDArray[np.int64]
    """[N] int64. Trajectory number of each; equal trajectories by number."""
    length_N: NDArray[np.int64]
    """[N] int64, >= 0. Tokens of each."""
    lcp_N: NDArray[np.int64]
    """[N] int64. Tokens shared with the trajectory before; 0 for the first."""
    rank_N: NDArray[np.int64]
    """[N] int64. Rank that holds each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TreeAcrossRanks:
    """A step's tree and where its trajectories are."""

    tree: PrefixTree
    """Of all ranks' trajectories, by their numbers in the step."""
    numbers: NDArray[np.int64]
    """[n] int64. Numbers of this rank's trajectories, in the order given."""
    rank_N: NDArray[np.int64]
    """[N] int64, by number. Rank that holds each trajectory of the step."""
    length_N: NDArray[np.int64]
    """[N] int64, by number. Tokens of each."""


def prefix_tree_across_ranks(
    trajectories: Sequence[Trajectory],
    exchange: Exchange,
    *,
    numbers: Sequence[int] | None = None,
    check: Callable[[TrajectoryBatch], None] | None = None,
) -> TreeAcrossRanks:
    """Merge the trajectories of all ranks where they start with the same tokens.

    Args:
        trajectories: Of this rank; may be none.
        exchange: With the others.
        numbers: Number of each in the step; over all ranks every number from 0 to N - 1 once. None counts rank after
            rank. With numbers of their own, the tree does not depend on where trajectories live.
        check: What else is asked of this rank's trajectories, if it has any: raises a ValueError.

    Returns:
        On every rank the tree that `build_prefix_tree` gives for all trajectories in the order of their numbers.

    Raises:
        ValueError: On all ranks: if a trajectory is wrong, as for `TrajectoryBatch.of` and `check`, which the rank that
            holds it explains and the others name that rank; if none has a trajectory, numbers are missing or given
            twice, or routes are of different models.

    Example:
        >>> from harts.data.exchange import run_in_threads
        >>> one, two = [Trajectory.of([1, 2, 3])], [Trajectory.of([1, 2]), Trajectory.of([1, 2, 4])]
        >>> found = run_in_threads(2, lambda ranks: prefix_tree_across_ranks((one, two)[ranks.rank], ranks))
        >>> [(f.tree.order_N.tolist(), f.tree.lcp_N.tolist()) for f in found]
        [([1, 0, 2], [0, 2, 2]), ([1, 0, 2], [0, 2, 2])]
    """
    try:
        identities = TokenIdentities.of(trajectories, check=check)
    except ValueError as error:
        identities = error
    found = sort_across_ranks(identities, exchange, numbers=numbers)
    if found.order_N.size == 0:
        raise ValueError("No rank has a trajectory, expected at least one. Skip the step if no rollout came back.")
    by_number = np.argsort(found.order_N)
    rank_N = found.rank_N[by_number]
    counted = np.flatnonzero(rank_N == exchange.rank)
    return TreeAcrossRanks(
        tree=tree_from_lcp(found.order_N, found.length_N, found.lcp_N),
        numbers=counted if numbers is None else np.asarray(numbers, dtype=np.int64),
        rank_N=rank_N,
        length_N=found.length_N[by_number],
    )


def sort_across_ranks(
    identities: TokenIdentities | ValueError,
    exchange: Exchange,
    *,
    numbers: Sequence[int] | None = None,
    chain: Chain = chain_digests,
) -> SortedAcrossRanks:
    """Sort the trajectories of all ranks and compare neighbours.

    Args:
        identities: Of this rank; or what is wrong with its trajectories, which all ranks then raise.
        exchange: With the others.
        numbers: As for `prefix_tree_across_ranks`.
        chain: Hashes the digests of blocks along paths; other ones are for tests.

    Returns:
        The same on every rank: what `harts.tree.lcp.sort_tokens` gives for all trajectories in the order of their
        numbers.

    Raises:
        ValueError: As `prefix_tree_across_ranks`.
        RuntimeError: If hashes collide again and again.
    """
    part, facts = _gather_facts(identities, exchange, numbers)
    form, num_blocks = RowFormat.of(facts[:, :FACTS]), facts[:, FACTS]
    listed = _gather_list(part, exchange, facts[:, 0])
    first_entry = int(np.searchsorted(listed.rank_N, exchange.rank))
    for seed in range(TRIES):
        hashes = part.hashes(form, chain, seed)
        gathered = exchange.all_gather(hashes.view(np.int64).reshape(-1), (2 * num_blocks).tolist())
        trie = match_blocks(listed, np.concatenate(gathered).view(np.uint64).reshape(-1, 2))
        if trie is None:
            continue
        items = list_items(trie, listed)
        found = resolve(
            plan_resolution(trie, items, listed),
            plan_checks(trie, listed),
            exchange,
            rows=lambda pieces: part.rows(form, pieces, first_entry),
            num_columns=form.num_columns,
        )
        if found is not None:
            entry_N, lcp_N = order_trajectories(trie, items.resolved(*found), listed)
            return SortedAcrossRanks(
                order_N=listed.number_N[entry_N],
                length_N=listed.length_N[entry_N],
                lcp_N=lcp_N,
                rank_N=listed.rank_N[entry_N],
            )
    raise RuntimeError(f"Hashes of different blocks were equal {TRIES} times in a row. The hash function is broken.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LocalPart:
    """This rank's trajectories, sorted."""

    identities: TokenIdentities
    order_N: NDArray[np.int64]
    lcp_N: NDArray[np.int64]
    number_N: NDArray[np.int64] | None
    entry_B: NDArray[np.int64]
    depth_B: NDArray[np.int64]
    parent_B: NDArray[np.int64]

    @classmethod
    def of(cls, identities: TokenIdentities, numbers: Sequence[int] | None) -> _LocalPart:
        number_N = None if numbers is None else np.asarray(numbers, dtype=np.int64).reshape(-1)
        if number_N is not None and number_N.size != identities.length_N.size:
            raise ValueError(
                f"Got {number_N.size} numbers for {identities.length_N.size} trajectories, expected one for each."
            )
        order_N, lcp_N = sort_tokens(identities.token_ids_F, identities.offsets, share_key_F=identities.class_F)
        entry_B, depth_B, parent_B, _ = cut_blocks(identities.length_N[order_N], lcp_N)
        return cls(
            identities=identities,
            order_N=order_N,
            lcp_N=lcp_N,
            number_N=number_N,
            entry_B=entry_B,
            depth_B=depth_B,
            parent_B=parent_B,
        )

    def facts(self) -> NDArray[np.int64]:
        return np.append(local_facts(self.identities), self.entry_B.size)

    def hashes(self, form: RowFormat, chain: Chain, seed: int) -> NDArray[np.uint64]:
        """[B, 2] uint64. Of the blocks that `cut_blocks` cuts."""
        begin_B = self.identities.offsets[self.order_N[self.entry_B]] + BLOCK_TOKENS * self.depth_B
        if form.num_columns == 1:
            return chain(block_digests(self.identities.token_ids_F, begin_B, BLOCK_TOKENS, seed), self.parent_B, seed)
        digests = np.empty((begin_B.size, 2), dtype=np.uint64)
        size = BLOCK_TOKENS * form.num_columns
        for some in range(0, begin_B.size, BLOCKS_AT_ONCE):
            begins = begin_B[some : some + BLOCKS_AT_ONCE]
            rows = form.rows(self.identities, ranges(begins, np.full_like(begins, BLOCK_TOKENS)))
            digests[some : some + BLOCKS_AT_ONCE] = block_digests(rows, size * np.arange(begins.size), size, seed)
        return chain(digests, self.parent_B, seed)

    def rows(self, form: RowFormat, pieces: Pieces, first_entry: int) -> NDArray[np.integer]:
        """What makes the tokens of some pieces of this rank's trajectories, one after the other."""
        begin = self.identities.offsets[self.order_N[pieces.entry_Q - first_entry]] + pieces.begin_Q
        return form.rows(self.identities, ranges(begin, pieces.size_Q))


def _gather_facts(
    identities: TokenIdentities | ValueError, exchange: Exchange, numbers: Sequence[int] | None
) -> tuple[_LocalPart, NDArray[np.int64]]:
    """This rank's part, and `[ranks, FACTS + 1]` of all; raises on all ranks what one finds wrong."""
    try:
        if isinstance(identities, ValueError):
            raise identities
        part, error = _LocalPart.of(identities, numbers), None
    except ValueError as wrong:
        part, error = _LocalPart.of(TokenIdentities.of([]), None), wrong
    message = np.append(part.facts(), error is not None)
    facts = np.stack(exchange.all_gather(message, [message.size] * exchange.ranks))
    raise_together(error, facts[:, -1])
    return part, facts[:, :-1]


def _gather_list(part: _LocalPart, exchange: Exchange, counts: NDArray[np.int64]) -> ListedTrajectories:
    """Lengths, common prefixes and numbers of all ranks."""
    base = np.cumsum(counts) - counts
    given_N = part.number_N
    number_N = base[exchange.rank] + part.order_N if given_N is None else given_N[part.order_N]
    columns = np.concatenate([part.identities.length_N[part.order_N], part.lcp_N, number_N])
    gathered = exchange.all_gather(columns, (3 * counts).tolist())
    length_N, lcp_N, number_N = np.concatenate([columns.reshape(3, -1) for columns in gathered], axis=1)
    bad = np.flatnonzero(np.sort(number_N) != np.arange(number_N.size))
    if bad.size:
        raise ValueError(
            f"Ranks number their {number_N.size} trajectories, but {np.sort(number_N)[bad[0]]} stands where {bad[0]} "
            f"is expected. Give every number from 0 to {number_N.size - 1} once over all ranks."
        )
    rank_N = np.repeat(np.arange(counts.size), counts)
    return ListedTrajectories(rank_N=rank_N, number_N=number_N, length_N=length_N, lcp_N=lcp_N)
