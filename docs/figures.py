"""Draws the figures of docs/concepts.md from the library's own arrays: `python -m docs.figures`.

All show the worked example (abcde, abxy, abcz, abc) with chunks of 2 tokens. `tests/test_docs.py` holds that the files
in docs/images are what this draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np

from harts.data import TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.layout.chunks import chunk_table
from harts.layout.packed import LayoutNeeds, PackedLayout, flat_to_packed, pack
from harts.tree import PrefixTree, build_prefix_tree

IMAGES = Path(__file__).parent / "images"
LETTERS = "abcdexyz"
CELL = 36
BLUE, PALE, GREY, ORANGE, INK, PAPER = "#3b6fb6", "#cfe0f5", "#d9dce3", "#d2691e", "#1c2330", "#ffffff"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The worked example through the stages."""

    batch: TrajectoryBatch
    """Its trajectories."""
    tree: PrefixTree
    """Their tree."""
    layout: PackedLayout
    """Packed, with chunks of 2."""

    @classmethod
    def build(cls) -> Example:
        """Run the stages."""
        batch = TrajectoryBatch.of(example_trajectories())
        tree = build_prefix_tree(batch)
        return cls(batch=batch, tree=tree, layout=pack(tree, batch, LayoutNeeds(chunk_size=2, conv_width=1)))

    def letter(self, packed: int) -> str:
        """Of a packed token."""
        return LETTERS[int(self.layout.token_ids_T[packed])]

    @property
    def packed_by_trajectory(self) -> dict[int, list[int]]:
        """Packed tokens of every trajectory, by its number."""
        pieces = np.split(flat_to_packed(self.tree), np.cumsum(self.tree.length_N)[:-1])
        return {int(n): piece.tolist() for n, piece in zip(self.tree.order_N, pieces, strict=True)}


@dataclass(kw_only=True, slots=True)
class Drawing:
    """An SVG under construction."""

    width: int
    """Pixels."""
    height: int
    """Pixels."""
    title: str
    """For readers that do not see it."""
    parts: list[str] = field(default_factory=list)
    """Elements so far."""

    def cell(self, x: float, y: float, text: str, *, fill: str = BLUE, dashed: bool = False) -> None:
        """A token."""
        ink = PAPER if fill in (BLUE, ORANGE) else INK
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{CELL - 4}" height="{CELL - 4}" rx="4" fill="{fill}" '
            f'stroke="{INK}" stroke-width="1"{dash}/>'
        )
        self.text(x + (CELL - 4) / 2, y + 21, text, ink=ink, size=16)

    def text(self, x: float, y: float, text: str, *, ink: str = INK, size: int = 12, anchor: str = "middle") -> None:
        """A line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{ink}">{escape(text)}</text>'
        )

    def line(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """From one point to another."""
        self.parts.append(
            f'<line x1="{begin[0]:g}" y1="{begin[1]:g}" x2="{end[0]:g}" y2="{end[1]:g}" stroke="{INK}" '
            'stroke-width="1.5"/>'
        )

    def svg(self) -> str:
        """The file."""
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="ui-monospace, monospace">\n<title>{escape(self.title)}'
            f'</title>\n<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


def draw_trajectories(example: Example) -> Drawing:
    """Every trajectory a row; tokens that a row before has already are grey."""
    drawing = Drawing(width=420, height=4 * CELL + 24, title="Four trajectories: 16 tokens, 8 of them distinct")
    seen: set[int] = set()
    for number, packed in sorted(example.packed_by_trajectory.items()):
        y = 12 + number * CELL
        drawing.text(12, y + 21, f"{number}", anchor="start")
        for depth, token in enumerate(packed):
            drawing.cell(40 + depth * CELL, y, example.letter(token), fill=GREY if token in seen else BLUE)
        repeated = len(seen.intersection(packed))
        drawing.text(240, y + 21, f"{len(packed) - repeated} new, {repeated} again", anchor="start")
        seen.update(packed)
    return drawing


def draw_tree(example: Example) -> Drawing:
    """Every distinct token once, below the token before it; first children go on to the right."""
    layout = example.layout
    rows: list[int] = []
    for token, parent in enumerate(layout.parent_T.tolist()):
        rows.append(rows[parent] if token > 0 and parent == token - 1 else max(rows, default=-1) + 1)
    ends: dict[int, list[int]] = {}
    for number, packed in sorted(example.packed_by_trajectory.items()):
        ends.setdefault(packed[-1], []).append(number)
    step, height = 112, 64
    drawing = Drawing(width=580, height=(max(rows) + 1) * height + 12, title="The prefix tree: 8 tokens")
    place = [
        (24 + position * step, 24 + row * height)
        for position, row in zip(layout.position_T.tolist(), rows, strict=True)
    ]
    for token, parent in enumerate(layout.parent_T.tolist()):
        if parent >= 0:
            middle = (CELL - 4) / 2
            drawing.line(
                (place[parent][0] + middle, place[parent][1] + middle), (place[token][0], place[token][1] + middle)
            )
    for token, (x, y) in enumerate(place):
        drawing.cell(x, y, example.letter(token), fill=ORANGE if token in ends else BLUE)
        note = f", ends {', '.join(map(str, ends[token]))}" if token in ends else ""
        drawing.text(x, y - 6, f"{token} x{int(layout.multiplicity_T[token])}{note}", anchor="start")
    return drawing


def draw_mask(example: Example) -> Drawing:
    """Which key each query sees, in packed order."""
    ends, positions = example.layout.subtree_end_T.tolist(), example.layout.position_T.tolist()
    count = len(ends)
    drawing = Drawing(width=480, height=(count + 2) * CELL + 24, title="The attention mask of the packed tree")
    left, top = 60, 44
    drawing.text(left + count * CELL + 46, top - 10, "position")
    drawing.text(8, top + count * CELL + 21, "subtree", anchor="start")
    drawing.text(8, top + count * CELL + 35, "end", anchor="start")
    for token in range(count):
        drawing.text(left + token * CELL + 16, top - 10, example.letter(token), size=16)
        drawing.text(left - 18, top + token * CELL + 21, example.letter(token), size=16)
        drawing.text(left + count * CELL + 46, top + token * CELL + 21, str(positions[token]), size=14)
        drawing.text(left + token * CELL + 16, top + count * CELL + 24, str(ends[token]), size=14)
        for key in range(count):
            visible = key <= token < ends[key]
            drawing.cell(left + key * CELL, top + token * CELL, "", fill=BLUE if visible else PAPER)
    return drawing


def draw_chunks(example: Example) -> Drawing:
    """Chunks of 2 tokens, level by level; tokens that are replayed are orange."""
    runs = example.layout.runs
    assert runs is not None
    table = chunk_table(runs)
    owned = set(table.slot_T.tolist())
    offsets = table.level_offsets.tolist()
    place: list[tuple[float, float]] = []
    for level, (begin, end) in enumerate(pairwise(offsets)):
        place += [(24 + level * 150, 48 + (chunk - begin) * 52) for chunk in range(begin, end)]
    drawing = Drawing(width=460, height=48 + 3 * 52 + 8, title="Chunks of 2 tokens, level by level")
    for level in range(table.num_levels):
        drawing.text(24 + level * 150 + CELL, 26, f"level {level}")
    for (x, y), tokens, parent in zip(place, table.token_GC.tolist(), table.parent_G.tolist(), strict=True):
        if parent >= 0:
            drawing.line((place[parent][0] + 2 * CELL - 4, place[parent][1] + 16), (x, y + 16))
        slot = place.index((x, y)) * runs.chunk_size
        for i, token in enumerate(tokens):
            fill = PAPER if token < 0 else BLUE if slot + i in owned else ORANGE
            letter = "" if token < 0 else example.letter(token)
            drawing.cell(x + i * CELL, y, letter, fill=fill, dashed=token < 0)
    return drawing


def draw_edges(example: Example) -> Drawing:
    """Distinct log-probabilities, and which of them every trained token reads."""
    edges = example.layout.edges
    count = edges.target_E.numel()
    drawing = Drawing(width=600, height=60 + 5 * CELL, title="7 log-probabilities, read by 12 trained tokens")
    for edge in range(count):
        name = f"{example.letter(int(edges.predictor_E[edge]))}→{LETTERS[int(edges.target_E[edge])]}"
        drawing.cell(70 + edge * 72, 36, str(edge), fill=BLUE)
        drawing.text(70 + edge * 72 + 16, 26, name, size=14)
    drawing.text(8, 57, "edge", anchor="start")
    reads = iter(edges.edge_P.tolist())
    for row, number in enumerate(example.tree.order_N.tolist()):
        y = 96 + row * CELL
        drawing.text(8, y + 21, f"{number}", anchor="start")
        for depth, token in enumerate(example.packed_by_trajectory[number]):
            x = 34 + depth * 96
            drawing.cell(x, y, example.letter(token), fill=GREY if depth == 0 else PALE)
            if depth > 0:  # every token but the first is trained
                drawing.text(x + 40, y + 21, f"← {next(reads)}", size=14, anchor="start")
    return drawing


FIGURES: dict[str, Callable[[Example], Drawing]] = {
    "trajectories.svg": draw_trajectories,
    "tree.svg": draw_tree,
    "mask.svg": draw_mask,
    "chunks.svg": draw_chunks,
    "edges.svg": draw_edges,
}


def main() -> None:
    """Write all figures."""
    example = Example.build()
    for name, draw in FIGURES.items():
        (IMAGES / name).write_text(draw(example).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
