"""The one exchange of tokens: items are sorted, and blocks with equal hashes compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from harts.data.exchange import Exchange
from harts.data.ragged import ranges
from harts.tree.block_plan import Checks, Pieces, Resolution
from harts.tree.lcp import sort_tokens

Rows = Callable[[Pieces], NDArray[np.integer]]
"""The rows of this rank's tokens, as `RowFormat.rows` writes them, of some pieces."""


def resolve(
    resolution: Resolution, checks: Checks, exchange: Exchange, *, rows: Rows, num_columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Sort what has to be sorted, each rank its part, and tell all ranks.

    Args:
        resolution: From `plan_resolution`.
        checks: From `plan_checks`.
        exchange: With the others.
        rows: Looks up this rank's tokens.
        num_columns: Integers of a row.

    Returns:
        `item_Q`, the items of each node in lexicographic order, and `lcp_Q`, tokens shared with the one before (0 for
        the first of a node), both [Q] int64 and equal on all ranks. None, on all ranks, if equal hashes hid different
        tokens.
    """
    mine = resolution.read_by(exchange.rank)
    parts, equal = _exchange_rows(resolution.pieces, checks, exchange, rows=rows, num_columns=num_columns)
    order_Q, lcp_Q = _sort_items(mine, parts, num_columns)
    counts = np.bincount(resolution.pieces.reader_Q, minlength=exchange.ranks)
    message = np.concatenate([[equal], order_Q, lcp_Q]).astype(np.int32)
    gathered = exchange.all_gather(message, (1 + 2 * counts).tolist())
    if not all(message[0] for message in gathered):
        return None
    items, lcps = [], []
    for rank, message in enumerate(gathered):
        order_Q, lcp_Q = message[1:].astype(np.int64).reshape(2, -1)
        items.append(resolution.read_by(rank).item_Q[order_Q])
        lcps.append(lcp_Q)
    return np.concatenate(items), np.concatenate(lcps)


def _exchange_rows(
    pieces: Pieces, checks: Checks, exchange: Exchange, *, rows: Rows, num_columns: int
) -> tuple[list[NDArray[np.integer]], bool]:
    """By holder, the rows of its pieces that this rank reads; and whether all checks of this rank hold."""
    me = exchange.rank
    others = [other for other in range(exchange.ranks) if other != me]
    # What does not concern this rank is dropped once, so that the rest does not grow with the number of ranks.
    fetched, checked = pieces.that_concern(me), checks.that_concern(me)
    own = rows(fetched.take(fetched.between(me, me)))
    sent, sizes = [own[:0]] * exchange.ranks, [0] * exchange.ranks
    for other in others:
        both = (fetched.take(fetched.between(me, other)), checked.shown.take(checked.shown.between(me, other)))
        sent[other] = np.concatenate([rows(part) for part in both])
        sizes[other] = num_columns * (fetched.tokens(other, me) + checked.shown.tokens(other, me))
    received = exchange.all_to_all(sent, sizes)
    parts, equal = [own] * exchange.ranks, True
    for other in others:
        end = num_columns * fetched.tokens(other, me)
        parts[other] = received[other][:end]
        compared = rows(checked.compared.take(checked.shown.between(other, me)))
        equal &= np.array_equal(received[other][end:], compared)
    return parts, equal


def _sort_items(
    mine: Resolution, parts: list[NDArray[np.integer]], num_columns: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort the items that this rank reads.

    Args:
        mine: These items.
        parts: Their rows, by holder, those of a holder in the order of its items.
        num_columns: Integers of a row.

    Returns:
        Their order, those of a node one after the other, and tokens shared with the one before.
    """
    size_Q = mine.pieces.size_Q * num_columns
    # Each item is written behind the number of its node, so that one sort does all nodes.
    offsets = np.concatenate([[0], np.cumsum(size_Q + 1)])
    values = np.empty(offsets[-1], dtype=parts[0].dtype)
    values[offsets[:-1]] = np.cumsum(np.diff(mine.node_Q, prepend=-1) != 0)
    for holder, part in enumerate(parts):
        held = np.flatnonzero(mine.pieces.holder_Q == holder)
        values[ranges(offsets[held] + 1, size_Q[held])] = part
    order_Q, lcp_Q = sort_tokens(values, offsets)
    return order_Q, np.maximum(lcp_Q - 1, 0) // num_columns
