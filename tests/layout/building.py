"""Trees for tests of the layout: from words, and from the lengths of segments."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from harts.data import Trajectory, TrajectoryBatch
from harts.tree import PrefixTree, build_prefix_tree, tree_from_lcp

Segments = list[tuple[int, int]]
"""(segment above, -1 for a root; tokens), parents before children."""


def tree_of(words: Sequence[str]) -> PrefixTree:
    return build_prefix_tree(TrajectoryBatch.of([Trajectory.of([ord(c) for c in word]) for word in words]))


def prefixes_of(words: Sequence[str]) -> list[str]:
    """The prefix that each packed token ends: pre-order of a trie is the order of its prefixes."""
    return sorted({word[: d + 1] for word in words for d in range(len(word))})


def random_words(rng: random.Random) -> list[str]:
    alphabet = "abc"[: rng.randint(1, 3)]
    return ["".join(rng.choices(alphabet, k=rng.randint(1, 11))) for _ in range(rng.randint(1, 12))]


def small_trie(rng: random.Random) -> list[str]:
    """At most 20 distinct tokens, deep for that: words grow out of the ends of others."""
    words, limit = ["".join(rng.choices("abc", k=rng.randint(1, 9)))], rng.randint(6, 20)
    for _ in range(rng.randint(1, 9)):
        parent = rng.choice(words)
        kept = rng.randint(0 if rng.random() < 0.3 else len(parent) // 2, len(parent))
        words.append(parent[:kept] + "".join(rng.choices("abc", k=rng.randint(1, 4))))
        if len(prefixes_of(words)) > limit:
            words.pop()
    rng.shuffle(words)
    return words


def tree_of_segments(segments: Segments) -> PrefixTree:
    """The tree whose paths part after each segment with several below it."""
    below: list[list[int]] = [[] for _ in range(len(segments) + 1)]
    ends: list[int] = []
    for i, (parent, tokens) in enumerate(segments):
        below[parent].append(i)
        ends.append(tokens + (ends[parent] if parent >= 0 else 0))
    lengths, shared = [], []
    stack = [(root, 0) for root in reversed(below[-1])]
    while stack:
        segment, common = stack.pop()
        if below[segment]:
            first, *others = below[segment]
            stack += [(other, ends[segment]) for other in reversed(others)]
            stack.append((first, common))
        else:
            lengths.append(ends[segment])
            shared.append(common)
    return tree_from_lcp(np.arange(len(lengths)), lengths, shared)


def caterpillar(num_branches: int, trunk: range, side: range, *, seed: int = 0, branching: int = 1) -> Segments:
    """A trunk with a side branch after each of its pieces, of random lengths.

    Args:
        num_branches: Side branches.
        trunk: Tokens of a piece of the trunk.
        side: Tokens of a side branch, or of a segment of one.
        seed: Of the random lengths.
        branching: Segments of each side branch; each is put below one of those before it.
    """
    rng = random.Random(seed)
    segments, end = [(-1, rng.choice(trunk))], 0
    for _ in range(num_branches):
        first = len(segments)
        for i in range(branching):
            segments.append((rng.randrange(first, first + i) if i else end, rng.choice(side)))
        segments.append((end, rng.choice(trunk)))
        end = len(segments) - 1
    return segments


def random_segments(count: int, tokens: range, *, seed: int = 0) -> Segments:
    """Each segment below a random one before it."""
    rng = random.Random(seed)
    return [(rng.randrange(i) if i else -1, rng.choice(tokens)) for i in range(count)]
