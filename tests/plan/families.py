"""Random steps of the kinds that agent training makes, as sorted lengths and common prefixes; no tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harts.plan import CostModel
from harts.plan.problem import Problem, make_problem
from harts.tree import PrefixTree, tree_from_lcp

COST = CostModel(flops_per_token=30000.0, flops_per_pair=1.0, flops_per_microbatch=3e7)
"""Attention costs as much as everything else at 30k tokens; a microbatch costs as much as 1000 tokens."""


class TreeWriter:
    """Appends leaves in lexicographic order."""

    def __init__(self) -> None:
        self.length: list[int] = []
        self.lcp: list[int] = []

    def leaf(self, length: int, lcp: int) -> None:
        """A trajectory that shares `lcp` tokens with the one before."""
        self.length.append(int(length))
        self.lcp.append(int(lcp) if self.lcp else 0)

    def tree(self) -> PrefixTree:
        return tree_from_lcp(np.arange(len(self.length)), self.length, self.lcp)


def _lengths(rng: np.random.Generator, mean: float, count: int, sigma: float = 0.6) -> np.ndarray:
    return np.maximum(16, rng.lognormal(np.log(mean), sigma, count)).astype(np.int64)


def grpo(rng: np.random.Generator, num: int) -> PrefixTree:
    """Groups of 16 answers to a prompt."""
    out = TreeWriter()
    for _ in range(num // 16):
        prompt = int(_lengths(rng, 1500, 1)[0])
        for i, answer in enumerate(np.minimum(_lengths(rng, 6000, 16, 0.8), 30_000)):
            out.leaf(prompt + answer, prompt if i else 0)
    return out.tree()


def agent(rng: np.random.Generator, num: int) -> PrefixTree:
    """Multi-turn agents, a trajectory a call, whose context is rewritten: a side branch at every turn."""
    out = TreeWriter()
    while len(out.length) < num:
        turns = int(rng.integers(8, 25))
        ends = 4000 + np.cumsum(_lengths(rng, 1800, turns))
        out.leaf(ends[-1], 0)
        for end in ends[-2::-1]:  # the deepest fork comes first in lexicographic order
            out.leaf(end + int(_lengths(rng, 1800, 1)[0]), end)
    return out.tree()


def _fork(out: TreeWriter, rng: np.random.Generator, above: int, lcp: int, leaves: int, mean: float = 1800) -> None:
    """A conversation that forks at random turns until `leaves` are left."""
    end = above + int(_lengths(rng, mean, 1)[0])
    if leaves == 1:
        out.leaf(end, lcp)
        return
    left = int(rng.integers(1, leaves))
    _fork(out, rng, end, lcp, left, mean)
    _fork(out, rng, end, end, leaves - left, mean)


def pareto(rng: np.random.Generator, num: int) -> PrefixTree:
    """Trees of heavy-tailed sizes."""
    out = TreeWriter()
    while len(out.length) < num:
        leaves = int(min(1 + rng.pareto(1.1) * 4, num / 5))
        _fork(out, rng, int(_lengths(rng, 4000, 1)[0]), 0, leaves)
    return out.tree()


def search_tree(rng: np.random.Generator, num: int) -> PrefixTree:
    """One tree that holds everything."""
    out = TreeWriter()
    _fork(out, rng, 2000, 0, num)
    return out.tree()


def giants(rng: np.random.Generator, num: int) -> PrefixTree:
    """Few very long trajectories among many short ones."""
    out = TreeWriter()
    for i in range(num // 16):
        prompt = int(_lengths(rng, 500, 1)[0])
        answers = _lengths(rng, 1500, 16)
        if i % 6 == 0:
            answers[0] = int(rng.integers(40_000, 64_000))
        for j, answer in enumerate(answers):
            out.leaf(prompt + answer, prompt if j else 0)
    return out.tree()


def system_prompt(rng: np.random.Generator, num: int) -> PrefixTree:
    """Groups below one long prompt that all share."""
    out = TreeWriter()
    system = int(rng.integers(8000, 16000))
    for _ in range(num // 8):
        prompt = system + int(_lengths(rng, 1500, 1)[0])
        for i, answer in enumerate(_lengths(rng, 2000, 8)):
            out.leaf(prompt + answer, prompt if i else system)
    return out.tree()


def small_tree(rng: np.random.Generator, num: int) -> PrefixTree:
    """A few short trajectories: groups, side branches and random forks, so that optima can be proved."""
    out = TreeWriter()
    while len(out.length) < num:
        leaves = int(min(rng.integers(1, 8), num - len(out.length)))
        kind, prompt = int(rng.integers(3)), int(rng.integers(1, 30))
        if kind == 0:
            for i in range(leaves):
                out.leaf(prompt + int(rng.integers(1, 40)), prompt if i else 0)
        elif kind == 1:
            ends = prompt + np.cumsum(rng.integers(1, 12, leaves))
            for i, end in enumerate(ends[::-1]):
                out.leaf(end + int(rng.integers(1, 12)), end if i else 0)
        else:
            _fork(out, rng, prompt, 0, leaves, mean=12)
    return out.tree()


FAMILIES: dict[str, Callable[[np.random.Generator, int], PrefixTree]] = {
    "grpo": grpo,
    "agent": agent,
    "pareto": pareto,
    "search_tree": search_tree,
    "giants": giants,
    "system_prompt": system_prompt,
}


def problem_of(family: str, *, ranks: int = 4, leaves: int = 120, seed: int = 0) -> Problem:
    """A step of a family, at twice its longest trajectory a microbatch."""
    tree = FAMILIES[family](np.random.default_rng(seed), leaves)
    return make_problem(tree, cost=COST, ranks=ranks, limit=2 * int(tree.length_N.max()), barrier=True)
