"""Everything that was found as one HTML file that needs nothing else.

`page.html` holds the page; this module writes the numbers into it. Trees are drawn on a canvas from arrays, so that
10^5 segments are no burden.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.inspect.breaks import BreakReport, Decoder
from harts.inspect.groups import GroupTree
from harts.inspect.summary import GroupReport, InspectReport
from harts.plan.plan import Plan

MAX_SEGMENTS = 200_000
"""Drawn; groups beyond are only counted."""
MAX_TEXTS = 20_000
MAX_ROWS = 500
TEXT_TOKENS = 24
GIB = 2.0**30


class DrawnTrees:
    """Collects what a page needs of the trees, group by group, until there are enough segments.

    Args:
        tokenizer: To show how segments begin; None shows no text.
    """

    def __init__(self, tokenizer: Decoder | None = None) -> None:
        """Nothing collected yet."""
        self._tokenizer = tokenizer
        self._arrays: dict[str, list[NDArray[np.int64]]] = {
            name: [] for name in ("parent", "start", "end", "top", "multiplicity", "trained", "tail")
        }
        self._texts: list[str] = []
        self._segments = self._trajectories = 0
        self.groups: list[dict[str, Any]] = []
        self.is_full = False

    def add(self, group: GroupTree) -> None:
        """Keep a group's tree, unless it does not fit any more."""
        tree = group.tree
        self.is_full = self.is_full or self._segments + tree.parent_S.size > MAX_SEGMENTS
        if self.is_full:
            return
        # Pre-order: the first trajectory that ends in or below a segment is the first whose tail is no smaller.
        place_S = np.searchsorted(tree.tail_N, np.arange(tree.parent_S.size))
        columns = {
            "parent": np.where(tree.parent_S >= 0, tree.parent_S + self._segments, -1),
            "start": tree.start_S,
            "end": tree.end_S,
            "top": place_S + self._trajectories,
            "multiplicity": tree.multiplicity_S,
            "trained": group.trained_S,
            "tail": tree.tail_N + self._segments,
        }
        for name, column in columns.items():
            self._arrays[name].append(column)
        self._add_texts(group, place_S)
        size = tree.tail_N.size
        self.groups.append(
            {"name": group.name, "top": self._trajectories, "size": size, "longest": int(tree.length_N.max())}
        )
        self._segments += tree.parent_S.size
        self._trajectories += size

    def _add_texts(self, group: GroupTree, place_S: NDArray[np.int64]) -> None:
        count = place_S.size
        if self._tokenizer is None or not group.trajectories or len(self._texts) + count > MAX_TEXTS:
            self._texts += [""] * (count if self._texts else 0)
            return
        self._texts += [""] * (self._segments - len(self._texts))
        tree = group.tree
        for number, start, end in zip(tree.order_N[place_S].tolist(), tree.start_S, tree.end_S, strict=True):
            ids = group.trajectories[number].token_ids[start : min(end, start + TEXT_TOKENS)]
            self._texts.append(self._tokenizer.decode(ids.tolist()))

    def to_dict(self) -> dict[str, Any]:
        """Arrays as base64 of 32-bit integers, groups, texts."""
        arrays = {name: _packed(columns) for name, columns in self._arrays.items()}
        return {**arrays, "groups": self.groups, "texts": self._texts or None}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotPicture:
    """A plan of the groups, to draw."""

    plan: Plan
    """The plan."""
    note: str
    """What was planned."""
    in_words: Callable[[float], str]
    """A cost with its unit."""

    def to_dict(self) -> dict[str, Any]:
        """Work, tokens, trajectories and words of every slot of every rank."""
        return {
            "note": self.note,
            "makespan": self.plan.makespan or 1.0,
            "overhead": self.plan.overhead,
            "slots": [
                [[m.predicted_work, m.num_tokens, len(m.trajectories), self.in_words(m.predicted_work)] for m in rank]
                for rank in self.plan.slots
            ],
        }


def render_page(
    title: str, report: InspectReport, *, trees: DrawnTrees, breaks: BreakReport, slots: SlotPicture | None = None
) -> str:
    """The page as text.

    Args:
        title: What was inspected.
        report: The numbers.
        trees: The trees.
        breaks: Where sharing ends.
        slots: A plan to draw, if there is one.
    """
    data = {
        "title": title,
        "note": _note(report, trees),
        "figures": _figures(report),
        **trees.to_dict(),
        "histograms": [
            {"name": "Tokens of a segment", "bins": report.segment_lengths.octaves()},
            {"name": "Tokens of a trajectory", "bins": report.trajectory_lengths.octaves()},
            {"name": "Trajectories that share a segment", "bins": report.multiplicities.octaves()},
        ],
        "chunks": report.chunk_rows(),
        "table": [_row(group) for group in report.groups[:MAX_ROWS]],
        "breaks": {
            "forks": breaks.forks,
            "examined": breaks.examined,
            "kinds": [{**asdict(kind), "hint": kind.hint} for kind in breaks.kinds],
        },
        "plan": None if slots is None else slots.to_dict(),
    }
    page = files("harts.inspect").joinpath("page.html").read_text(encoding="utf-8")
    # Inside a script element only `<` could end it.
    return page.replace("DATA", json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"), 1)


def _row(group: GroupReport) -> dict[str, Any]:
    """What the table shows of a group: no figures by chunk size."""
    return {name: value for name, value in group.to_dict().items() if not isinstance(value, (dict, list))}


def _packed(columns: list[NDArray[np.int64]]) -> str:
    whole = np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)
    return base64.b64encode(whole.astype("<i4").tobytes()).decode("ascii")


def _note(report: InspectReport, trees: DrawnTrees) -> str:
    notes = []
    if len(trees.groups) < len(report.groups):
        notes.append(f"The first {len(trees.groups):,} of {len(report.groups):,} groups are drawn; all are counted.")
    if len(report.groups) > MAX_ROWS:
        notes.append(f"The table holds the first {MAX_ROWS} groups.")
    if report.skipped:
        notes.append(f"{report.skipped:,} damaged records were skipped.")
    return " ".join(notes)


def _figures(report: InspectReport) -> list[tuple[str, str]]:
    headline = report.to_dict()
    figures = [
        ("groups", f"{headline['groups']:,}"),
        ("trajectories", f"{headline['trajectories']:,}"),
        ("tokens", f"{headline['tokens_flat']:,}"),
        ("distinct tokens", f"{headline['tokens_distinct']:,}"),
        ("ratio", f"{headline['ratio']:.2f}"),
        ("branch points", f"{headline['branch_points']:,}"),
        ("rounds at C = 64", f"{headline['rounds_f']}"),
    ]
    if headline["predicted_speedup"] is not None:
        figures += [
            ("predicted speed-up", f"{headline['predicted_speedup']:.2f}x"),
            ("memory of the largest group", f"{headline['memory_bytes'] / GIB:.1f} GiB"),
            ("with recomputation", f"{headline['memory_bytes_recomputed'] / GIB:.1f} GiB"),
        ]
    return figures
