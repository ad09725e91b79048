"""Even slots for large steps: what microbatches hold of different trees changes places.

Trees share nothing, so what a packing has put together of one tree, a *part*, can run in any microbatch, beside parts
of other trees, and nothing more is repeated. Slots are filled one after another. The height of a slot is the largest
part left, or an even share of what is left if that is more; parts are placed by descending work, each in the lowest
microbatch of the slot with room for it. So the slots of the large parts are filled up with small ones, and those of the
small parts are even.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from harts.plan.problem import Problem
from harts.plan.slots import by_bin, recount

MORE_SLOTS = 4
"""Slots tried beyond the fewest that could hold all tokens, as a part of these: one in so many."""


def fill_evenly(problem: Problem, bin_J: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Place the parts of a packing's bins anew.

    Args:
        problem: With barriers.
        bin_J: [J] int64. Bin of each job, each bin within the token limit.

    Returns:
        [J] int64, the microbatch of each job, some of which may be empty; None if no number of slots that was tried
        could hold all parts. Work and tokens of all microbatches together are no more than those of the bins.
    """
    order_J = by_bin(bin_J)
    root_J = np.cumsum(problem.lcp_J == 0)
    is_next_J = (np.diff(bin_J[order_J], prepend=-1) != 0) | (np.diff(root_J[order_J], prepend=-1) != 0)
    part_J = np.empty_like(bin_J)
    part_J[order_J] = np.cumsum(is_next_J) - 1
    work_I, tokens_I = recount(problem, part_J)
    order_I = np.argsort(-work_I, kind="stable")
    fewest = -(-int(tokens_I.sum()) // (problem.limit * problem.ranks))
    for num_slots in range(fewest, fewest + fewest // MORE_SLOTS + 2):
        number_I = _fill(order_I, work_I, tokens_I, (num_slots, problem.ranks, problem.limit))
        if (number_I >= 0).all():
            return number_I[part_J]
    return None


@numba.njit(cache=True)
def _fill(order_I, work_I, tokens_I, size):
    """Microbatch of each part, slot by slot, -1 for those that found no room; `order_I` sorts them by descending
    work."""
    num_slots, ranks, limit = size
    number_I = np.full(order_I.size, -1, dtype=np.int64)
    left, first = work_I.sum(), 0
    for slot in range(num_slots):
        while first < order_I.size and number_I[order_I[first]] >= 0:
            first += 1
        if first == order_I.size:
            break
        share = ranks * (num_slots - slot)
        height = max(work_I[order_I[first]], (left + share - 1) // share)
        if slot + 1 == num_slots:
            height = left
        work_R, tokens_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks, dtype=np.int64)
        lowest = 0
        for part in order_I[first:]:
            if number_I[part] >= 0 or work_R[lowest] + work_I[part] > height:
                continue
            best = -1
            for rank in range(ranks):
                if tokens_R[rank] + tokens_I[part] <= limit and (best < 0 or work_R[rank] < work_R[best]):
                    best = rank
            if best < 0 or work_R[best] + work_I[part] > height:
                continue
            number_I[part] = slot * ranks + best
            work_R[best] += work_I[part]
            tokens_R[best] += tokens_I[part]
            left -= work_I[part]
            lowest = np.argmin(work_R)
    return number_I
