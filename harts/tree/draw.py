"""A prefix tree as text, one line a segment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from harts.tree.prefix_tree import PrefixTree


def draw_tree(tree: PrefixTree, text: Callable[[NDArray[np.int64]], str] | None = None) -> str:
    """Draw a tree.

    Args:
        tree: Any tree; a line a segment, so meant for small ones.
        text: From the packed indices of a segment's tokens to what to show for them; None shows their number.

    Returns:
        Lines with the text of a segment, how many trajectories contain it, and which trajectories end with it.

    Example:
        >>> from harts.tree import tree_from_lcp
        >>> tree = tree_from_lcp([3, 0, 2, 1], [3, 5, 4, 4], [0, 3, 3, 2])
        >>> print(draw_tree(tree, lambda packed: "".join("abcdezxy"[i] for i in packed)))
        ab x4
        ├─ c x3, ends 3
        │  ├─ de x1, ends 0
        │  └─ z x1, ends 2
        └─ xy x1, ends 1
    """
    ends: dict[int, list[int]] = {}
    for segment, trajectory in zip(tree.tail_N.tolist(), tree.order_N.tolist(), strict=True):
        ends.setdefault(segment, []).append(trajectory)
    last_child = {parent: segment for segment, parent in enumerate(tree.parent_S.tolist())}
    indents: list[str] = []  # what stands before the children of each segment
    lines: list[str] = []
    for segment, parent in enumerate(tree.parent_S.tolist()):
        is_last = last_child[parent] == segment
        before = "" if parent < 0 else indents[parent] + ("└─ " if is_last else "├─ ")
        indents.append("" if parent < 0 else indents[parent] + ("   " if is_last else "│  "))
        size = int(tree.end_S[segment] - tree.start_S[segment])
        packed = np.arange(tree.offset_S[segment], tree.offset_S[segment] + size)
        label = f"({size} tokens)" if text is None else text(packed)
        note = f", ends {', '.join(map(str, ends[segment]))}" if segment in ends else ""
        lines.append(f"{before}{label} x{tree.multiplicity_S[segment]}{note}")
    return "\n".join(lines)
