"""One rank for each of as many columns, all different, with the largest sum of weights; compiled."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def assign_best(weight_CR):
    """The best assignment, by shortest augmenting paths with potentials (Kuhn 1955; Jonker and Volgenant 1987).

    Time grows with the cube of the ranks at worst.

    Args:
        weight_CR: [R, R] int64, >= 0.

    Returns:
        [R] int64. Rank of each column.

    Example:
        >>> assign_best(np.array([[5, 4], [4, 0]])).tolist()
        [1, 0]
    """
    ranks = weight_CR.shape[0]
    far = np.int64(2**62)
    # Entry `ranks` stands for the column that is being placed.
    column_of = np.full(ranks + 1, -1, dtype=np.int64)
    price_C, price_R = np.zeros(ranks, dtype=np.int64), np.zeros(ranks + 1, dtype=np.int64)
    before = np.empty(ranks + 1, dtype=np.int64)
    for column in range(ranks):
        column_of[ranks] = column
        distance, reached = np.full(ranks, far), np.zeros(ranks + 1, dtype=np.bool_)
        rank = ranks
        while column_of[rank] >= 0:
            reached[rank] = True
            at, nearest, step = column_of[rank], -1, far
            for other in range(ranks):
                if reached[other]:
                    continue
                length = -weight_CR[at, other] - price_C[at] - price_R[other]
                if length < distance[other]:
                    distance[other], before[other] = length, rank
                if distance[other] < step:
                    step, nearest = distance[other], other
            for other in range(ranks + 1):
                if reached[other]:
                    price_C[column_of[other]] += step
                    price_R[other] -= step
                elif other < ranks:
                    distance[other] -= step
            rank = nearest
        while rank != ranks:
            column_of[rank] = column_of[before[rank]]
            rank = before[rank]
    rank_C = np.empty(ranks, dtype=np.int64)
    for rank in range(ranks):
        rank_C[column_of[rank]] = rank
    return rank_C


@numba.njit(cache=True)
def assign_greedily(column_Q, rank_Q, ranks):
    """Take pairs as they come where both are free; what is left over goes together in ascending order.

    With the heaviest pairs first this reaches half of the largest sum at least.

    Args:
        column_Q: [Q] int64.
        rank_Q: [Q] int64.
        ranks: How many there are, of columns too.

    Returns:
        [R] int64. Rank of each column.
    """
    rank_C, is_taken = np.full(ranks, -1, dtype=np.int64), np.zeros(ranks, dtype=np.bool_)
    for pair in range(column_Q.size):
        column, rank = column_Q[pair], rank_Q[pair]
        if rank_C[column] < 0 and not is_taken[rank]:
            rank_C[column], is_taken[rank] = rank, True
    free = 0
    for column in range(ranks):
        if rank_C[column] < 0:
            while is_taken[free]:
                free += 1
            rank_C[column], is_taken[free] = free, True
    return rank_C
