"""Trees of about as many distinct tokens each: made ones of a given number of rounds, and measured ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harts.layout.rounds import plan_runs
from harts.tree import tree_from_lcp
from harts.tree.prefix_tree import PrefixTree

WORKLOADS = ("swe_calls_last5", "mini_swe_calls_last5", "tau_airline_calls", "swe_final")


def chain(num_tokens: int, rounds: int, chunk_size: int) -> PrefixTree:
    """One long trajectory that others of one token more leave, each in a chunk of its own: nothing is parallel."""
    trunk = num_tokens - (rounds - 1)
    leaves = [trunk * i // rounds // chunk_size * chunk_size + chunk_size // 2 for i in range(1, rounds)]
    return _with_side_leaves(trunk, leaves, 1, rounds, chunk_size)


def caterpillar(num_tokens: int, rounds: int, chunk_size: int) -> PrefixTree:
    """A trunk and side leaves as long as the pieces of the trunk between them."""
    piece = num_tokens // (2 * rounds - 1)
    leaves = [piece * i + min(i, 2) for i in range(1, rounds)]
    return _with_side_leaves(num_tokens - piece * (rounds - 1), leaves, piece, rounds, chunk_size)


def _with_side_leaves(trunk: int, leaves: list[int], side: int, rounds: int, chunk_size: int) -> PrefixTree:
    """The trunk first, then side leaves from the deepest up."""
    depths = leaves[::-1]
    tree = tree_from_lcp(np.arange(rounds), [trunk] + [depth + side for depth in depths], [0, *depths])
    found = plan_runs(tree, chunk_size).num_rounds
    assert found == rounds, f"made for {rounds} rounds, but has {found}"
    return tree


def measured(folder: Path, num_tokens: int) -> Iterator[tuple[str, PrefixTree]]:
    """Of each file the first trajectories of its groups, as many as have that many distinct tokens together.

    Files whose first trajectory alone has more are left out.
    """
    for name in WORKLOADS:
        length: list[int] = []
        lcp: list[int] = []
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            for line in file:
                group = json.loads(line)
                length += group["length"]
                lcp += group["lcp"]
                total = np.cumsum(np.array(length) - np.array(lcp))
                if total[-1] >= num_tokens:
                    break
        count = int(np.searchsorted(total, num_tokens, side="right"))
        if count:
            yield name, tree_from_lcp(np.arange(count), length[:count], lcp[:count])
