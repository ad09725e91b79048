"""What `harts inspect` prints. Names and texts come from files, so they are shown as plain text, never as markup."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harts.inspect.breaks import BreakReport, Decoder
from harts.inspect.groups import GroupTree
from harts.inspect.page import GIB
from harts.inspect.summary import QUANTILES, InspectReport
from harts.inspect.text import printable
from harts.inspect.view import MAX_LINES, draw_lines

MAX_GROUPS = 20
NAME_WIDTH, GROUP_WIDTH, TEXT_WIDTH = 28, 20, 72
LABEL_TOKENS, LABEL_WIDTH = 12, 40


class ShownTree:
    """Draws one tree as text: the first that fits on a screen and branches, or else the first.

    Args:
        tokenizer: To show how segments begin; None shows no text.
    """

    def __init__(self, tokenizer: Decoder | None = None) -> None:
        """Nothing drawn yet."""
        self._tokenizer = tokenizer
        self._fits = False
        self.name = ""
        self.lines = ""

    def add(self, group: GroupTree) -> None:
        """Draw a group, if it is the one to show."""
        fits = 2 < group.tree.parent_S.size <= MAX_LINES
        if self._fits or (self.lines and not fits):
            return
        self._fits, self.name = fits, group.name
        self.lines = draw_lines(group.tree, text=lambda packed: self._label(group, packed))

    def _label(self, group: GroupTree, packed: NDArray[np.int64]) -> str:
        size = f"({packed.size:,} tokens)"
        if self._tokenizer is None or not group.trajectories:
            return size
        tree = group.tree
        segment = int(np.searchsorted(tree.offset_S, packed[0], side="right")) - 1
        number = int(tree.order_N[np.searchsorted(tree.tail_N, segment)])
        begin = int(tree.start_S[segment])
        ids = group.trajectories[number].token_ids[begin : begin + min(packed.size, LABEL_TOKENS)]
        return f"{size} {printable(self._tokenizer.decode(ids.tolist()), LABEL_WIDTH)}"


def print_report(report: InspectReport, breaks: BreakReport, shown: ShownTree, console: Console) -> None:
    """Print everything that was found."""
    console.print(_headline(report), highlight=False)
    console.print(_chunks(report))
    if len(report.groups) > 1:
        console.print(_groups(report))
    if breaks.examined:
        _print_breaks(breaks, console)
    console.print(Text(f"Tree of group {printable(shown.name, NAME_WIDTH) or '0'}", style="italic"))
    console.print(Text(shown.lines), no_wrap=True, overflow="ellipsis")


def _headline(report: InspectReport) -> Text:
    numbers: dict[str, Any] = report.to_dict()
    lines = [
        f"{numbers['groups']:,} groups, {numbers['trajectories']:,} trajectories: {numbers['tokens_flat']:,} tokens, "
        f"{numbers['tokens_distinct']:,} distinct, ratio {numbers['ratio']:.2f}",
        f"{numbers['branch_points']:,} branch points, at most {numbers['max_depth']} on a path; "
        f"{numbers['trained_flat']:,} trained tokens, {numbers['trained_distinct']:,} distinct",
    ]
    heads = ", ".join(f"{share:.0%}" for share in QUANTILES[:-1])
    for name, histogram in (("segments", report.segment_lengths), ("trajectories", report.trajectory_lengths)):
        values = ", ".join(f"{value:,}" for value in histogram.quantiles(QUANTILES))
        lines.append(f"tokens of {name} ({heads}, longest): {values}")
    if numbers["predicted_speedup"] is not None:
        lines.append(
            f"predicted {numbers['predicted_speedup']:.2f}x against flat; the largest group as one microbatch takes "
            f"about {numbers['memory_bytes'] / GIB:.1f} GiB, {numbers['memory_bytes_recomputed'] / GIB:.1f} GiB with "
            "recomputation, beside parameters and optimiser"
        )
    if report.skipped:
        lines.append(f"{report.skipped:,} damaged records skipped")
    return Text("\n".join(lines))


def _chunks(report: InspectReport) -> Table:
    table = Table(title="Linear attention: rounds, most of a group (median)", box=SIMPLE, title_justify="left")
    for column in ("chunk size", "model F", "model E", "replayed", "of distinct", "forks on boundaries"):
        table.add_column(column, justify="right")
    for row in report.chunk_rows():
        table.add_row(
            f"{row['chunk_size']}",
            f"{row['rounds_f']} ({row['rounds_f_median']:g})",
            f"{row['rounds_e']} ({row['rounds_e_median']:g})",
            f"{row['replayed']:,}",
            f"{row['replayed_share']:.2%}",
            f"{row['on_boundary']:.1%}",
        )
    return table


def _groups(report: InspectReport) -> Table:
    rest = len(report.groups) - MAX_GROUPS
    with_model = bool(report.predictions)
    table = Table(
        title="Groups (N trajectories, rounds of models F/E at C = 64)",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
        title_justify="left",
        caption=f"and {rest:,} more" if rest > 0 else None,
    )
    table.add_column("group", max_width=GROUP_WIDTH)
    columns = ["N", "tokens", "distinct", "ratio", "forks", "F/E", "replayed"]
    for column in columns + ["gain"] * with_model:
        table.add_column(column, justify="right", no_wrap=True)
    for number, group in enumerate(report.groups[:MAX_GROUPS]):
        chunk = group.chunks[0]
        sizes = (group.trajectories, group.tokens_flat, group.tokens_distinct)
        table.add_row(
            Text(printable(group.name, GROUP_WIDTH) or str(number)),
            *(f"{size:,}" for size in sizes),
            f"{group.ratio:.2f}",
            f"{group.branch_points:,}",
            f"{chunk.rounds_f}/{chunk.rounds_e}",
            f"{chunk.replayed:,}",
            *([] if group.prediction is None else [f"{group.prediction.speedup:.2f}x"]),
        )
    return table


def _print_breaks(breaks: BreakReport, console: Console) -> None:
    table = Table(
        title=f"Where sharing ends: {breaks.examined:,} of {breaks.forks:,} forks between neighbours",
        box=SIMPLE,
        title_justify="left",
    )
    table.add_column("kind")
    table.add_column("forks", justify="right")
    table.add_column("tokens that could be shared", justify="right")
    table.add_column("what would help", overflow="fold")
    for kind in breaks.kinds:
        table.add_row(kind.name, f"{kind.count:,}", f"at least {kind.tokens:,}" if kind.hint else "", kind.hint)
    console.print(table)
    for kind in breaks.kinds:
        if not kind.hint:
            continue
        example = kind.examples[0]
        one, other = example.trajectories
        text = Text(
            f"{kind.name}: group {printable(example.group, NAME_WIDTH)}, trajectories {one} and {other} "
            f"after {example.depth:,} tokens\n"
        )
        # The end of what is shared tells more than its beginning.
        text.append(f"    … {printable(example.before)[-TEXT_WIDTH:]}\n", style="dim")
        for side in (example.first, example.second):
            text.append(f"    | {printable(side, TEXT_WIDTH)}\n")
        console.print(text, no_wrap=True, overflow="ellipsis")
