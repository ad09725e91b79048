"""One tree, to look at: in a terminal, and inline in a notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from harts.data import RolloutGroup, Trajectory
from harts.data.readers import GroupShape
from harts.inspect.groups import group_tree
from harts.tree import PrefixTree, TreeSummary, describe_tree, draw_tree

MAX_LINES = 24
MAX_TEXT_SEGMENTS = 20_000
MAX_RECTANGLES = 2000
WIDTH, ROW, MAX_HEIGHT = 900.0, 22.0, 420.0
SHADES = ("#5b9bd0", "#4487c2", "#2f73b1", "#1e5f9e", "#124b86", "#0a386a")
"""From one trajectory to all: readable with white text, and against light and dark pages."""


class TreeView:
    """A tree that shows itself: `print` draws it as text, a notebook as a picture.

    In the picture a segment is as wide as it has tokens and as high as trajectories contain it, so the area is that of
    the tokens of all trajectories, and what is higher than a row is computed once instead of many times.
    """

    def __init__(self, tree: PrefixTree, name: str = "") -> None:
        """Show a tree.

        Args:
            tree: Any.
            name: Of what it is; shown escaped.
        """
        self.tree = tree
        self.name = name
        self.summary: TreeSummary = describe_tree(tree)

    def __repr__(self) -> str:
        return f"{self.headline()}\n{draw_lines(self.tree)}"

    def _repr_html_(self) -> str:
        """What notebooks show: one picture without scripts."""
        name = f"<b>{escape(self.name)}</b> " if self.name else ""
        return f"<div>{name}{escape(self.headline())}<br>{_svg(self.tree)}</div>"

    def headline(self) -> str:
        """The numbers in one line."""
        s = self.summary
        return (
            f"{s.num_trajectories:,} trajectories, {s.num_trajectory_tokens:,} tokens, {s.num_tokens:,} distinct "
            f"(ratio {s.ratio:.2f}), {s.num_branch_points:,} branch points, at most {s.max_depth} on a path"
        )


def describe(source: PrefixTree | RolloutGroup | GroupShape | Sequence[Trajectory]) -> TreeView:
    """Look at the tree of some trajectories.

    Args:
        source: A tree, a group as `harts.read` gives it, or trajectories.

    Returns:
        What prints as text and shows as a picture in notebooks; `.summary` has the numbers, `.tree` the arrays.

    Raises:
        ValueError: If there is no trajectory, or one has no tokens.

    Example:
        >>> from harts.data.trajectory import example_trajectories
        >>> describe(example_trajectories())
        4 trajectories, 16 tokens, 8 distinct (ratio 2.00), 2 branch points, at most 2 on a path
        (2 tokens) x4
        ├─ (1 tokens) x3, ends 3
        │  ├─ (2 tokens) x1, ends 0
        │  └─ (1 tokens) x1, ends 2
        └─ (2 tokens) x1, ends 1
    """
    if isinstance(source, PrefixTree):
        return TreeView(source)
    if isinstance(source, RolloutGroup | GroupShape):
        return TreeView(group_tree(source).tree, source.name)
    return TreeView(group_tree(RolloutGroup(name="", trajectories=tuple(source))).tree)


def draw_lines(
    tree: PrefixTree, *, most: int = MAX_LINES, text: Callable[[NDArray[np.int64]], str] | None = None
) -> str:
    """A tree as text, clipped.

    Args:
        tree: Any.
        most: Lines.
        text: As for `draw_tree`.
    """
    if tree.parent_S.size > MAX_TEXT_SEGMENTS:
        return f"({tree.parent_S.size:,} segments, too many to draw as text)"
    lines = draw_tree(tree, text).splitlines()
    rest = len(lines) - most
    return "\n".join(lines if rest <= 0 else [*lines[:most], f"... {rest:,} more segments"])


def _svg(tree: PrefixTree) -> str:
    """The segments with the largest areas; the rest would be specks."""
    count, longest = tree.order_N.size, int(tree.length_N.max())
    row = min(ROW, MAX_HEIGHT / count)
    size_S = tree.end_S - tree.start_S
    top_S = np.searchsorted(tree.tail_N, np.arange(size_S.size))
    largest = np.argsort(-size_S * tree.multiplicity_S, kind="stable")[:MAX_RECTANGLES]
    parts = []
    for s in np.sort(largest).tolist():
        multiplicity, size = int(tree.multiplicity_S[s]), int(size_S[s])
        shade = SHADES[round(math.log(multiplicity) / math.log(count) * (len(SHADES) - 1)) if count > 1 else 0]
        x, width = tree.start_S[s] / longest * WIDTH, size / longest * WIDTH
        y, height = top_S[s] * row, multiplicity * row
        title = f"{size:,} tokens, depth {tree.start_S[s]:,} to {tree.end_S[s]:,}, in {multiplicity} of {count}"
        parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width - 1, 0.3):.2f}" height="{max(height - 1, 0.3):.2f}" '
            f'fill="{shade}"><title>{title}</title></rect>'
        )
        if width > 50 and height > 13:
            parts.append(
                f'<text x="{x + 4:.2f}" y="{y + height / 2:.2f}" dominant-baseline="central" fill="#fff" '
                f'pointer-events="none">{size:,} &times;{multiplicity}</text>'
            )
    note = f"<br>{size_S.size - largest.size:,} smaller segments are not drawn." if size_S.size > largest.size else ""
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {row * count:.0f}" style="max-width:{WIDTH:.0f}px;width:100%" role="img" '
        f'font-family="system-ui,sans-serif" font-size="11">{"".join(parts)}</svg>{note}'
    )
