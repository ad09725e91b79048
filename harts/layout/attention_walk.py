"""The walk behind `harts/layout/attention_blocks.py`. Compiled.

Of the key blocks before a query block, those with a key that the first query sees are kept on a stack, innermost on
top. A block whose subtrees all ended is never needed again, and none of those below it ended earlier: what is above
it in the stack lies below it in the tree. So the stack is the list, and a query block costs what it lists.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def list_blocks(end_T, position_T, sizes, by_key, count, partial, full):
    """Classify every block that has a visible pair.

    Args:
        end_T: [T] int64, one past the last descendant of each token.
        position_T: [T] int64, depth of each token.
        sizes: Queries of a block, keys of a block, window (0 for none).
        by_key: Whether rows are key blocks and columns query blocks, or the other way round.
        count: [2, rows] int32, zeros. Partial and full blocks of each row; written.
        partial, full: [rows, width] int32. Columns, ascending; written unless the width is 0.
    """
    query_size, key_size, window = sizes
    tokens = end_T.size
    last_end, first_end = _extremes(end_T, key_size)
    first_key = _extremes(position_T, key_size)[1]
    last_query = _extremes(position_T, query_size)[0]
    stack, depth, passed = np.empty(last_end.size, dtype=np.int64), 0, 0
    near, least = np.empty(last_end.size, dtype=np.bool_), np.empty(query_size, dtype=np.int64)
    for row in range(last_query.size):
        start, stop = row * query_size, min(tokens, (row + 1) * query_size)
        while (passed + 1) * key_size <= start:
            while depth > 0 and last_end[stack[depth - 1]] <= (passed + 1) * key_size:
                depth -= 1
            stack[depth] = passed
            depth += 1
            passed += 1
        while depth > 0 and last_end[stack[depth - 1]] <= start:
            depth -= 1
        lowest = 0
        if window > 0:
            _least_positions(position_T[start:stop], least)
            lowest = _in_window((end_T, position_T), stack[:depth], (start, stop, key_size, window), least, near)
        own = (stop + key_size - 1) // key_size
        for place in range(lowest, depth + own - passed):
            block = stack[place] if place < depth else passed + place - depth
            if window > 0 and place < depth and not near[place]:
                continue
            # A block with a query of the row among its keys has a visible pair. Full ones have no key after a query.
            whole = first_end[block] >= stop and min(tokens, (block + 1) * key_size) - 1 <= start
            whole = whole and (window == 0 or last_query[row] - first_key[block] < window)
            line, column = (block, row) if by_key else (row, block)
            if whole:
                if full.shape[1] > 0:
                    full[line, count[1, line]] = column
                count[1, line] += 1
            else:
                if partial.shape[1] > 0:
                    partial[line, count[0, line]] = column
                count[0, line] += 1


@numba.njit(cache=True)
def _extremes(values_T, size):
    """The largest and the least value of every block of `size`."""
    blocks = (values_T.size + size - 1) // size
    largest, least = np.empty(blocks, dtype=np.int64), np.empty(blocks, dtype=np.int64)
    for block in range(blocks):
        part = values_T[block * size : (block + 1) * size]
        largest[block], least[block] = part.max(), part.min()
    return largest, least


@numba.njit(cache=True)
def _least_positions(position, least):
    """Running minimum of the positions of one block of queries."""
    for i in range(position.size):
        least[i] = position[i] if i == 0 else min(least[i - 1], position[i])


@numba.njit(cache=True)
def _in_window(arrays, stack, bounds, least, near):
    """Mark the blocks of the stack with a key in some query's window; the first place from which any may be.

    Going down the stack, and through a block from its end, the keys of the path lie higher and higher. A key serves
    the queries up to its subtree's end, of which the one with the least position is nearest.
    """
    end_T, position_T = arrays
    start, stop, key_size, window = bounds
    beyond = least[stop - start - 1] - window  # a key at this position or above is out of every window
    for place in range(stack.size - 1, -1, -1):
        near[place] = False
        nearest = -1
        for key in range((stack[place] + 1) * key_size - 1, stack[place] * key_size - 1, -1):
            if end_T[key] <= start:
                continue
            if nearest < 0:
                nearest = key
            if position_T[key] <= beyond:
                break
            if least[min(stop, end_T[key]) - start - 1] - position_T[key] < window:
                near[place] = True
                break
        if position_T[nearest] <= beyond:
            return place + 1
    return 0
