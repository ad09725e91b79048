"""Trees whose attention is measured: of a given form, or of real agent logs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tree:
    """Packed tokens of one microbatch, without their ids."""

    name: str
    """Its form."""
    subtree_end_T: NDArray[np.int64]
    """[T] int64."""
    position_T: NDArray[np.int64]
    """[T] int64."""
    window: int | None = None
    """Positions of its path that a token sees, its own included; None for all."""

    @classmethod
    def of(cls, name: str, position_T: NDArray[np.int64]) -> Tree:
        """The tree with these positions in pre-order; a token's subtree ends where its depth is reached again."""
        end, path = np.full(position_T.size, position_T.size), []
        for token, depth in enumerate(position_T.tolist()):
            end[path[depth:]] = token
            del path[depth:]
            path.append(token)
        return cls(name=name, subtree_end_T=end, position_T=position_T)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.position_T.size

    @property
    def pairs(self) -> int:
        """Queries and the keys they see."""
        seen_T = self.position_T + 1
        return int(seen_T.sum() if self.window is None else np.minimum(seen_T, self.window).sum())

    def through(self, window: int | None) -> Tree:
        """The same tree with this window."""
        return self if window is None else replace(self, name=f"{self.name}, window {window}", window=window)


def prefix_and_branches(prefix: int, branch: int, count: int) -> Tree:
    """`count` branches of `branch` tokens below one prefix."""
    pieces = [np.arange(prefix), *[np.arange(prefix, prefix + branch)] * count]
    return Tree.of(f"prefix {prefix} + {count} x {branch}", np.concatenate(pieces))


def caterpillar(piece: int, tokens: int, *, trunk_first: bool) -> Tree:
    """A trunk with a side leaf after every piece, both of `piece` tokens."""
    starts = np.arange(0, tokens // 2, piece)
    trunk = [np.arange(start, start + piece) for start in starts]
    leaves = [np.arange(start + piece, start + 2 * piece) for start in starts]
    if trunk_first:
        return Tree.of(f"caterpillar {piece}, trunk first", np.concatenate(trunk + leaves[::-1]))
    # The last piece's own leaf stands beside nothing.
    pairs = [part for both in zip(trunk, leaves, strict=True) for part in both]
    return Tree.of(f"caterpillar {piece}, leaf first", np.concatenate(pairs))


def forms(tokens: int) -> list[Tree]:
    """The trees of the targets, each of `tokens` tokens."""
    prefix = tokens // 4
    rest = tokens - prefix
    return [
        *(prefix_and_branches(prefix, branch, rest // branch) for branch in (2048, 512, 256, 128, 64)),
        *(caterpillar(piece, tokens, trunk_first=first) for piece in (512, 128) for first in (False, True)),
    ]


def recorded(folder: Path, tokens: int) -> Iterator[Tree]:
    """Of every file one microbatch of about `tokens` distinct tokens, as logged and with the largest subtree first.

    A line holds one task's trajectories in lexicographic order: their lengths, and what each shares with the one
    before.
    """
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            groups = [json.loads(line) for line in lines]
        # Of the tasks that fill a microbatch, the one in the middle.
        groups.sort(key=_distinct)
        filling = [group for group in groups if _distinct(group) >= tokens] or groups[-1:]
        group = filling[len(filling) // 2]
        pieces, total = [], 0
        for number, (length, lcp) in enumerate(zip(group["length"], group["lcp"], strict=True)):
            shared = lcp if number else 0
            if total and total + length - shared > 1.1 * tokens:
                break
            pieces.append(np.arange(shared, length))
            total += length - shared
        name = path.name.removesuffix(".jsonl.gz")
        tree = Tree.of(f"{name}, as logged", np.concatenate(pieces))
        yield tree
        yield Tree.of(f"{name}, largest first", largest_first(tree))


def largest_first(tree: Tree) -> NDArray[np.int64]:
    """[T] positions of the same tree in pre-order with the largest subtree first among siblings."""
    end, position = tree.subtree_end_T, tree.position_T
    order: list[NDArray[np.int64]] = []
    # Pieces of a path without branches, and subtrees still to come, the next one last.
    waiting = _children(end, 0, end.size)
    while waiting:
        start, stop = waiting.pop()
        # Down to the first token whose subtree is more than one child's.
        alone = np.flatnonzero(end[start:stop] != stop)
        last = start + (alone[0] if alone.size else stop - start) - 1
        order.append(position[start : last + 1])
        waiting += _children(end, int(last) + 1, stop)
    return np.concatenate(order)


def _children(end: NDArray[np.int64], start: int, stop: int) -> list[tuple[int, int]]:
    """Subtrees that lie one beside the other in `start:stop`, the largest last."""
    found = []
    while start < stop:
        found.append((start, int(end[start])))
        start = int(end[start])
    return sorted(found, key=lambda subtree: subtree[1] - subtree[0])


def _distinct(group: dict[str, list[int]]) -> int:
    return sum(group["length"]) - sum(group["lcp"])
