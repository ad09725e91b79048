"""Trees go home where that is free: two ranks swap trees of a plan that each holds for the other.

Without barriers only the rank with the most work counts, so two trees may change places as long as none gets more work
than that rank has, and no microbatch more tokens than fit. With groups of equal shape, all can go home.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostModel
from harts.plan.locality import Holdings, bits_in_common
from harts.plan.plan import Plan, fill_slots
from harts.plan.slots import Places, shared_in_bins
from harts.tree import PrefixTree

MOST_WEIGHTS = 2**24
"""Pieces times ranks. Larger plans are left as they are."""
SWEEPS = 4
"""Over all pieces; in each a piece moves once at most on its own account."""


def swap_home(plan: Plan, tree: PrefixTree, holdings: Holdings, *, cost: CostModel) -> Plan:
    """Swap trees between ranks so that fewer bits have to move and the step takes no longer.

    What moves is a piece: what a microbatch runs of one tree, beyond the tokens that all trajectories begin with.

    Args:
        plan: For the tree. With barriers, or without sharing, it is left as it is.
        tree: Of the step.
        holdings: Of all ranks.
        cost: That the plan was made with.

    Returns:
        A plan with as many slots and no larger makespan.

    Example:
        >>> from harts.plan import make_plan
        >>> from harts.plan.locality import running_ranks
        >>> from harts.tree import tree_from_lcp
        >>> tree = tree_from_lcp([0, 1, 2, 3], [4, 4, 4, 4], [0, 0, 0, 0])
        >>> cost = CostModel(flops_per_token=1.0, flops_per_pair=0.0)
        >>> plan = make_plan(tree, max_tokens_per_microbatch=8, cost=cost, ranks=2, barrier=False)
        >>> rank_N = running_ranks(plan)[[1, 0, 2, 3]]
        >>> holdings = Holdings(rank_N=rank_N, bits_N=np.zeros(4, dtype=np.int64), bits_per_token=32)
        >>> bool((running_ranks(swap_home(plan, tree, holdings, cost=cost)) == rank_N).all())
        True
    """
    pieces = _Pieces.of(plan, tree, cost)
    if plan.barrier or not plan.sharing or pieces.count * plan.ranks > MOST_WEIGHTS:
        return plan
    weight_PR = np.zeros(pieces.count * plan.ranks)
    for pair, bits in bits_in_common(tree, pieces.by_number(tree), holdings, shape=(pieces.count, plan.ranks)):
        np.add.at(weight_PR, pair, bits)
    weight_PR = weight_PR.reshape(pieces.count, plan.ranks)
    bin_P = pieces.swapped(plan, weight_PR)
    bin_N = bin_P[pieces.piece_N]
    lcp_N = shared_in_bins(tree.parent_S, tree.end_S, tree.tail_N, bin_N)
    rank_B, slot_B = np.divmod(np.arange(plan.ranks * plan.num_slots), plan.num_slots)
    swapped = replace(plan, slots=fill_slots(tree, cost, bin_N, lcp_N, Places(rank_B=rank_B, slot_B=slot_B)))
    # Sums that were kept up to date are rounded otherwise than those counted anew.
    return swapped if swapped.makespan <= plan.makespan else plan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pieces:
    """What each microbatch runs of each tree, beyond the tokens that all trajectories begin with."""

    piece_N: NDArray[np.int64]
    """[N] int64, in the tree's order. Piece of each trajectory."""
    bin_P: NDArray[np.int64]
    """[P] int64. Microbatch, counted rank after rank."""
    work_P: NDArray[np.float64]
    """[P] float64. FLOPs."""
    tokens_P: NDArray[np.int64]
    """[P] int64. Distinct tokens."""

    @classmethod
    def of(cls, plan: Plan, tree: PrefixTree, cost: CostModel) -> _Pieces:
        bin_by_number = np.empty(tree.order_N.size, dtype=np.int64)
        for number, microbatch in enumerate(microbatch for rank in plan.slots for microbatch in rank):
            bin_by_number[list(microbatch.trajectories)] = number
        bin_N = bin_by_number[tree.order_N]
        # Where all begin alike, trees part behind those tokens.
        stem = int(tree.lcp_N[1:].min(initial=tree.length_N[0]))
        tree_N = np.cumsum(tree.lcp_N <= stem)
        _, piece_N = np.unique(bin_N * (tree_N[-1] + 1) + tree_N, return_inverse=True)
        bin_P = np.empty(piece_N.max() + 1, dtype=np.int64)
        bin_P[piece_N] = bin_N
        lcp_N = shared_in_bins(tree.parent_S, tree.end_S, tree.tail_N, bin_N)
        lcp_N = np.maximum(lcp_N, stem)
        work_N = cost.path_work(tree.length_N) - cost.path_work(lcp_N)
        work_P, tokens_P = np.zeros(bin_P.size), np.zeros(bin_P.size, dtype=np.int64)
        np.add.at(work_P, piece_N, work_N)
        np.add.at(tokens_P, piece_N, tree.length_N - lcp_N)
        return cls(piece_N=piece_N, bin_P=bin_P, work_P=work_P, tokens_P=tokens_P)

    @property
    def count(self) -> int:
        """P."""
        return self.bin_P.size

    def by_number(self, tree: PrefixTree) -> NDArray[np.int64]:
        """[N] int64, by number. Piece of each trajectory."""
        piece_N = np.empty_like(self.piece_N)
        piece_N[tree.order_N] = self.piece_N
        return piece_N

    def swapped(self, plan: Plan, weight_PR: NDArray[np.float64]) -> NDArray[np.int64]:
        """[P] int64. Microbatch of each piece after the swaps."""
        rank_P = self.bin_P // plan.num_slots
        load_R = np.array([math.fsum(m.predicted_work for m in rank) for rank in plan.slots])
        tokens_B = np.array([m.num_tokens for rank in plan.slots for m in rank])
        gain_P = weight_PR.max(axis=1) - weight_PR[np.arange(self.count), rank_P]
        bin_P = self.bin_P.copy()
        order_P = np.argsort(-gain_P, kind="stable")
        for _ in range(SWEEPS):
            sizes = (self.work_P, self.tokens_P)
            if not _swap(bin_P, order_P, sizes, weight_PR, load_R, (tokens_B, plan.max_tokens_per_microbatch)):
                break
        return bin_P


@numba.njit(cache=True)
def _swap(bin_P, order_P, sizes, weight_PR, load_R, tokens):
    """Let each piece in turn change places with the one on its best rank that saves most; whether any did.

    Args:
        bin_P: [P] int64. Microbatch of each piece, counted rank after rank; changed.
        order_P: [P] int64. Pieces in their turns.
        sizes: `work_P` and `tokens_P` of `_Pieces`.
        weight_PR: [P, R] float64. What need not move if a rank runs a piece.
        load_R: [R] float64. Work of each rank; changed.
        tokens: [B] int64, tokens of each microbatch, changed; and the most that one may have.
    """
    (work_P, tokens_P), (tokens_B, limit) = sizes, tokens
    num_slots = tokens_B.size // load_R.size
    # Sums that are kept up to date are off by some roundings.
    most = load_R.max() * (1 - 1e-12)
    at = np.argsort(bin_P, kind="mergesort")
    place_P = np.empty_like(at)
    place_P[at] = np.arange(at.size)
    first_R = np.searchsorted(bin_P[at], num_slots * np.arange(load_R.size + 1))
    any_swapped = False
    for one in order_P:
        here, there = bin_P[one] // num_slots, np.argmax(weight_PR[one])
        most_saved, found = 0.0, -1
        for other in at[first_R[there] : first_R[there + 1]]:
            saved = weight_PR[one, there] - weight_PR[one, here] + weight_PR[other, here] - weight_PR[other, there]
            more, more_tokens = work_P[other] - work_P[one], tokens_P[other] - tokens_P[one]
            if (
                saved > most_saved
                and (more <= 0 or load_R[here] + more <= most)
                and (more >= 0 or load_R[there] - more <= most)
                and tokens_B[bin_P[one]] + more_tokens <= limit
                and tokens_B[bin_P[other]] - more_tokens <= limit
            ):
                most_saved, found = saved, other
        if found < 0:
            continue
        any_swapped = True
        more, more_tokens = work_P[found] - work_P[one], tokens_P[found] - tokens_P[one]
        load_R[here] += more
        load_R[there] -= more
        tokens_B[bin_P[one]] += more_tokens
        tokens_B[bin_P[found]] -= more_tokens
        bin_P[one], bin_P[found] = bin_P[found], bin_P[one]
        at[place_P[one]], at[place_P[found]] = found, one
        place_P[one], place_P[found] = place_P[found], place_P[one]
    return any_swapped
