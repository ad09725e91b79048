"""What a planner has to place: jobs, their trie, and integer work.

A job is a trajectory that no other contains. Duplicates and trajectories that end inside another cost nothing beside
the one that covers them, so they follow it and change no plan. Work is counted in integers, so that sums do not depend
on their order and every rank and machine arrives at the same plan. `J` is a dimension over jobs, `B` over microbatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostModel
from harts.tree import PrefixTree, tree_from_lcp

WORK_BITS = 52
"""Work of all jobs, nothing shared, stays below 2 to this power: sums fit 64 bits and floats hold them exactly."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """Jobs to be put in microbatches of at most `limit` distinct tokens, and those in slots of `ranks` ranks.

    Work of a set of jobs is that of its trie: the sum of `own_S` over the segments that any of its jobs runs through.

    Example:
        Of the words abcde, abxy, abcz, abc the last is inside the first: jobs abcde, abcz, abxy with
        `job_N` [0, 0, 1, 2] and `lcp_J` [0, 3, 2].
    """

    job_N: NDArray[np.int64]
    """[N] int64, ascending. Job that covers each trajectory of the tree, in the tree's order."""
    length_J: NDArray[np.int64]
    """[J] int64. Tokens of each job, in lexicographic order."""
    lcp_J: NDArray[np.int64]
    """[J] int64. Tokens shared with the job before."""
    shortest_J: NDArray[np.int64]
    """[J] int64. Jobs by ascending length."""
    tail_J: NDArray[np.int64]
    """[J] int64. Segment of each job's last token; a leaf of the trie."""
    parent_S: NDArray[np.int64]
    """[S] int64. Segment above, -1 for a root; smaller than the segment's own number."""
    end_S: NDArray[np.int64]
    """[S] int64. Depth of the segment's end, in tokens."""
    size_S: NDArray[np.int64]
    """[S] int64. Tokens of the segment."""
    path_D: NDArray[np.int64]
    """[longest + 1] int64, ascending. Work of the first tokens of a path, by their number."""
    unit: float
    """FLOPs of one unit of work; a power of two."""
    rounding: int
    """Units by which the work of any set of microbatches may differ from that in FLOPs; 0 if work is exact."""
    overhead: int
    """Units that every slot costs beside its work."""
    ranks: int
    """Data-parallel ranks."""
    limit: int
    """Most distinct tokens of a microbatch."""
    barrier: bool
    """Whether ranks wait for each other after every slot."""

    @property
    def own_S(self) -> NDArray[np.int64]:
        """[S] int64. Work of the tokens of each segment."""
        return self.path_D[self.end_S] - self.path_D[self.end_S - self.size_S]

    @property
    def num_jobs(self) -> int:
        """J."""
        return self.length_J.size

    @property
    def total_work(self) -> int:
        """Units, every distinct token once."""
        return int((self.path_D[self.length_J] - self.path_D[self.lcp_J]).sum())

    @property
    def largest_tree(self) -> int:
        """Units, every distinct token of the tree with the most work once."""
        own_J = self.path_D[self.length_J] - self.path_D[self.lcp_J]
        return int(np.add.reduceat(own_J, np.flatnonzero(self.lcp_J == 0)).max())


def make_problem(tree: PrefixTree, *, cost: CostModel, ranks: int, limit: int, barrier: bool) -> Problem:
    """Drop what costs nothing and count work in integers.

    Args:
        tree: The step's trajectories.
        cost: Any cost model whose path work does not fall with length.
        ranks: >= 1.
        limit: Tokens, at least the longest trajectory.
        barrier: As documented on `Problem`.
    """
    covered_N = np.zeros(tree.length_N.size, dtype=bool)
    covered_N[:-1] = tree.lcp_N[1:] == tree.length_N[:-1]
    last_N = np.flatnonzero(~covered_N)
    first_N = np.concatenate([[0], last_N[:-1] + 1])
    length_J = tree.length_N[last_N]
    trie = tree_from_lcp(last_N, length_J, np.minimum.reduceat(tree.lcp_N, first_N))
    path_D, unit, rounding = _integer_work(cost, length_J)
    return Problem(
        job_N=np.concatenate([[0], np.cumsum(~covered_N)[:-1]]),
        length_J=length_J,
        lcp_J=trie.lcp_N,
        shortest_J=np.argsort(length_J, kind="stable"),
        tail_J=trie.tail_N,
        parent_S=trie.parent_S,
        end_S=trie.end_S,
        size_S=trie.end_S - trie.start_S,
        path_D=path_D,
        unit=unit,
        rounding=rounding,
        overhead=round(cost.flops_per_microbatch / unit),
        ranks=ranks,
        limit=limit,
        barrier=barrier,
    )


def _integer_work(cost: CostModel, length_J: NDArray[np.int64]) -> tuple[NDArray[np.int64], float, int]:
    """Work of a path by length in units, the unit, and how far off a sum over all jobs may be."""
    flops_D = cost.path_work(np.arange(int(length_J.max()) + 1))
    assert (np.diff(flops_D) >= 0).all(), "work grows along a path"
    # A power of two scales without rounding. The slot overhead has to fit as well.
    largest = max(float(flops_D[-1]), cost.flops_per_microbatch) * length_J.size
    unit = math.ldexp(1.0, math.frexp(largest)[1] - WORK_BITS) if largest > 0 else 1.0
    if (flops_D == np.rint(flops_D)).all():
        unit = max(unit, 1.0)
    scaled_D = flops_D / unit
    path_D = np.rint(scaled_D).astype(np.int64)
    is_exact = bool((scaled_D == path_D).all())
    return path_D, unit, 0 if is_exact else length_J.size + 1


@numba.njit(cache=True)
def jobs_below(parent_S, tail_J):
    """First job and number of jobs below each segment."""
    first_S = np.full(parent_S.size, tail_J.size, dtype=np.int64)
    count_S = np.zeros(parent_S.size, dtype=np.int64)
    for job in range(tail_J.size):
        first_S[tail_J[job]], count_S[tail_J[job]] = job, 1
    for segment in range(parent_S.size - 1, -1, -1):
        if parent_S[segment] >= 0:
            first_S[parent_S[segment]] = min(first_S[parent_S[segment]], first_S[segment])
            count_S[parent_S[segment]] += count_S[segment]
    return first_S, count_S
