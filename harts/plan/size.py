"""What a microbatch consists of, counted from its tree: the quantities that a cost model multiplies.

Runs, rounds and replayed rows are those of `harts.layout.rounds.plan_runs`, counted without laying anything out, so
that plans of millions of trajectories can be played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchSize:
    """How much of everything one forward and backward pass holds.

    Example:
        The words abcde, abxy, abcz, abc with chunks of 2 tokens: 8 tokens, 26 pairs, 4 runs in 2 rounds, 1 replayed.
    """

    tokens: int
    """Tokens computed."""
    pairs: int
    """(token, token it sees) pairs of one layer of full attention, the token itself included."""
    window_pairs: int = 0
    """Such pairs of all layers with a window together."""
    loss_edges: int = 0
    """Rows that go through the LM head."""
    runs: int = 0
    """Runs of linear attention, each with a state that is kept; 0 without linear attention."""
    rounds: int = 0
    """Rounds of linear attention, one after the other; 0 without linear attention."""
    replayed: int = 0
    """Rows of linear attention that repeat a token of another run."""


def size_of_tree(
    tree: PrefixTree, *, chunk_size: int | None = None, windows: Sequence[int] = (), loss_edges: int = 0
) -> MicrobatchSize:
    """Count what a packed microbatch consists of.

    Args:
        tree: Of its trajectories.
        chunk_size: C of the model's linear attention; None if it has none.
        windows: One entry for each layer that sees a window only: its tokens, the token itself included.
        loss_edges: Distinct predicted tokens that are trained; the tree does not know them.
    """
    runs, rounds, replayed = (0, 0, 0) if chunk_size is None else _count_runs(tree, chunk_size)
    return MicrobatchSize(
        tokens=tree.num_tokens,
        pairs=int((pairs_of_path(tree.length_N) - pairs_of_path(tree.lcp_N)).sum()),
        window_pairs=int(sum((pairs_of_path(tree.length_N, w) - pairs_of_path(tree.lcp_N, w)).sum() for w in windows)),
        loss_edges=loss_edges,
        runs=runs,
        rounds=rounds,
        replayed=replayed,
    )


def size_of_flat(
    length_N: NDArray[np.int64], *, has_linear_attention: bool = False, windows: Sequence[int] = (), loss_edges: int = 0
) -> MicrobatchSize:
    """Count what trajectories consist of when each runs alone, padding not counted.

    Args:
        length_N: [N] int64. Tokens of each.
        has_linear_attention: Whether each trajectory is a run.
        windows: As for `size_of_tree`.
        loss_edges: Trained tokens, shared or not.
    """
    return MicrobatchSize(
        tokens=int(length_N.sum()),
        pairs=int(pairs_of_path(length_N).sum()),
        window_pairs=int(sum(pairs_of_path(length_N, w).sum() for w in windows)),
        loss_edges=loss_edges,
        runs=length_N.size if has_linear_attention else 0,
        rounds=1 if has_linear_attention else 0,
    )


def pairs_of_path(length: NDArray[np.int64], window: int | None = None) -> NDArray[np.int64]:
    """Pairs of the first `length` tokens of a path, each seeing at most `window` tokens; elementwise."""
    if window is None:
        return length * (length + 1) // 2
    inside = np.minimum(length, window)
    return inside * (inside + 1) // 2 + (length - inside) * window


def count_loss_edges(
    length_N: Sequence[int], lcp_N: Sequence[int], loss_spans: Sequence[Sequence[Sequence[int]]]
) -> int:
    """Distinct trained tokens of sorted trajectories.

    Args:
        length_N: [N] tokens of each, in lexicographic order.
        lcp_N: [N] tokens shared with the one before.
        loss_spans: For each trajectory the half-open `[begin, end)` spans of trained positions.

    Example:
        >>> count_loss_edges([3, 3], [0, 2], [[[1, 3]], [[1, 3]]])  # the second position is shared
        3
    """
    pieces: list[tuple[int, int]] = []  # (first depth, packed index of depth 0) of the parts of the current path
    trained: list[tuple[int, int]] = []  # the same spans on packed tokens
    packed = 0
    for length, lcp, spans in zip(length_N, lcp_N, loss_spans, strict=True):
        while pieces and pieces[-1][0] >= lcp:
            pieces.pop()
        if length > lcp:
            pieces.append((lcp, packed - lcp))
            packed += length - lcp
        for begin, end in spans:
            upper = min(end, length)
            for first, shift in reversed(pieces):
                if upper > max(first, begin):
                    trained.append((max(first, begin) + shift, upper + shift))
                upper = min(upper, first)
                if upper <= begin:
                    break
    return _union(trained)


def _union(spans: list[tuple[int, int]]) -> int:
    covered, reached = 0, -1
    for begin, end in sorted(spans):
        if end > reached:
            covered += end - max(begin, reached)
            reached = end
    return covered


def _count_runs(tree: PrefixTree, chunk_size: int) -> tuple[int, int, int]:
    """Runs, rounds and replayed rows."""
    from harts.plan.run_counts import count_runs

    return count_runs(tree.parent_S, tree.start_S, tree.end_S, chunk_size)
