"""A plan for the first groups, so that a page can show how they would fill the slots of a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harts.inspect.groups import GroupTree
from harts.inspect.page import SlotPicture
from harts.inspect.predict import ModelCosts
from harts.plan.plan import make_plan
from harts.plan.size import size_of_tree
from harts.tree import tree_from_lcp

RANKS = 8
MAX_TOKENS = 65_536
MAX_TRAJECTORIES = 4096
"""Of one step; planning more takes longer than looking at it is worth."""


class StepPlanner:
    """Collects the shapes of the first groups, then plans one step of them.

    Args:
        model: Its costs.
    """

    def __init__(self, model: ModelCosts) -> None:
        """Nothing collected yet."""
        self._model = model
        self._lengths: list[NDArray[np.int64]] = []
        self._lcps: list[NDArray[np.int64]] = []
        self._trained = self._trajectories = 0
        self._is_full = False

    def add(self, group: GroupTree) -> None:
        """Keep a group, unless it does not fit any more."""
        size = group.tree.length_N.size
        self._is_full = self._is_full or self._trajectories + size > MAX_TRAJECTORIES
        if not self._is_full:
            self._lengths.append(group.tree.length_N)
            self._lcps.append(group.tree.lcp_N)
            self._trained += int(group.trained_S.sum())
            self._trajectories += size

    def picture(self) -> SlotPicture | None:
        """The plan; None if not even the first group fits."""
        if not self._lengths:
            return None
        length_N, lcp_N = np.concatenate(self._lengths), np.concatenate(self._lcps)
        tree = tree_from_lcp(np.arange(length_N.size), length_N, lcp_N)
        costs = self._model.costs
        size = size_of_tree(tree, chunk_size=costs.chunk_size, windows=costs.windows, loss_edges=self._trained)
        limit = max(MAX_TOKENS, int(length_N.max()))
        plan = make_plan(
            tree,
            max_tokens_per_microbatch=limit,
            cost=costs.tree.for_planner(size, windows=costs.windows),
            ranks=RANKS,
        )
        words = self._model.in_words
        note = (
            f"A step of the first {len(self._lengths):,} groups on {RANKS} ranks with at most {limit:,} distinct "
            f"tokens a microbatch, for {self._model.name}: ranks down, time to the right; all ranks wait for the "
            f"slowest of a slot (orange). It takes {words(plan.makespan)}; no plan takes less than "
            f"{words(plan.lower_bound)}. Use harts plan for other ranks and limits."
        )
        return SlotPicture(plan=plan, note=note, in_words=words)
