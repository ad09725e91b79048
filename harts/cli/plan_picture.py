"""A plan as a picture: slots by ranks, in the terminal and as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harts.cli.model_names import NamedCosts
from harts.cli.steps import StepShape
from harts.plan.cost import microbatch_memory
from harts.plan.plan import Microbatch, Plan
from harts.plan.sharing import SharingReport
from harts.plan.size import size_of_tree

BARS = " ▁▂▃▄▅▆▇█"
MAX_RANKS_SHOWN = 32
MAX_CELLS_DRAWN = 20_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedStep:
    """A step and its plan."""

    step: StepShape
    """What was planned."""
    plan: Plan
    """How."""
    sharing: SharingReport
    """Whether sharing pays."""
    named: NamedCosts
    """The costs used."""
    seconds: float
    """Wall time of planning."""

    @property
    def tokens_computed(self) -> int:
        """Tokens of all microbatches."""
        return sum(m.num_tokens for rank in self.plan.slots for m in rank)

    @property
    def ratio_kept(self) -> float:
        """Tokens of all trajectories over tokens computed: what is left of the sharing after planning."""
        return self.step.tree.num_trajectory_tokens / self.tokens_computed

    def work(self, value: float) -> str:
        """A cost in words."""
        if not self.named.fitted:
            return f"{value / 1e15:.4g} PFLOP"
        return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def print_step(planned: PlannedStep, console: Console) -> None:
    """Print a step's plan."""
    plan, tree = planned.plan, planned.step.tree
    console.print(
        f"[bold]{planned.step.num_groups} groups, {tree.length_N.size} trajectories[/bold]: "
        f"{tree.num_trajectory_tokens:,} tokens, {tree.num_tokens:,} distinct "
        f"(ratio {tree.num_trajectory_tokens / tree.num_tokens:.2f}); "
        f"{plan.ranks} ranks x {plan.num_slots} slots, planned in {planned.seconds:.2f} s"
    )
    console.print(_grid(plan))
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("plan")
    table.add_column("makespan", justify="right")
    table.add_column("to lower bound", justify="right")
    rows = [("[bold]this plan[/bold]", plan.makespan), *sorted(plan.peers.items(), key=lambda item: item[1])]
    for name, makespan in [*rows, ("lower bound", plan.lower_bound)]:
        ratio = f"{makespan / plan.lower_bound:.4f}" if plan.lower_bound else "-"
        table.add_row(name, planned.work(makespan), ratio)
    console.print(table)
    for line in _facts(planned):
        console.print(line, highlight=False)
    console.print()


def write_html(path: Path, steps: Sequence[PlannedStep]) -> None:
    """Draw plans in one file that needs nothing else."""
    body = "\n".join(_section(number, planned) for number, planned in enumerate(steps, start=1))
    path.write_text(_PAGE.replace("BODY", body), encoding="utf-8")


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>HARTS plan</title>
<style>body{font:14px/1.5 system-ui,sans-serif;margin:2rem;max-width:72rem;color:#1c2330}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.15rem .8rem;text-align:right;border-bottom:1px solid #dde}
td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto;background:#f4f5f8}
.cell{fill:#3b6fb6}.slowest{fill:#d2691e}</style>
<h1>Plan: ranks down, time to the right</h1>
<p>A bar is a microbatch, as long as its predicted time. All ranks wait for the slowest of a slot (orange).</p>
BODY
</html>
"""


def _grid(plan: Plan) -> Text:
    """One line a rank, one character a slot, as high as its work; the slowest of a slot in colour."""
    columns = list(zip(*plan.slots, strict=True))
    slowest = [max(m.predicted_work for m in column) for column in columns]
    top = max(slowest) or 1.0
    text = Text()
    for number, rank in enumerate(plan.slots[:MAX_RANKS_SHOWN]):
        text.append(f"rank {number:>4} ")
        for microbatch, most in zip(rank, slowest, strict=True):
            bar = BARS[round(microbatch.predicted_work / top * (len(BARS) - 1))]
            text.append(bar, style="dark_orange" if microbatch.predicted_work == most else "blue")
        text.append("\n")
    if plan.ranks > MAX_RANKS_SHOWN:
        text.append(f"and {plan.ranks - MAX_RANKS_SHOWN} ranks more\n")
    return text


def _facts(planned: PlannedStep) -> list[str]:
    plan, tree = planned.plan, planned.step.tree
    largest = max((m for rank in plan.slots for m in rank), key=lambda m: m.num_tokens)
    facts = [
        f"ratio kept {planned.ratio_kept:.2f} of {tree.num_trajectory_tokens / tree.num_tokens:.2f}; "
        f"imbalance of the slots (P95) {plan.imbalance_p95:.2%}",
        *planned.sharing.text().splitlines(),
    ]
    if plan.sharing:
        facts += [_replay(planned), _memory(planned, largest)]
    return facts + _too_short(planned)


def _too_short(planned: PlannedStep) -> list[str]:
    """Whether the host takes longer to start some microbatches than the device to run them."""
    calibration = planned.named.calibration
    if calibration is None:
        return []
    fit = calibration.tree if planned.plan.sharing else calibration.flat
    all_of_them = [m for rank in planned.plan.slots for m in rank]
    short = sum(m.predicted_work + planned.plan.overhead < fit.least for m in all_of_them)
    if short == 0:
        return []
    return [
        f"{short} of {len(all_of_them)} microbatches are shorter than the {planned.work(fit.least)} that the host "
        "takes to start one: the step takes longer than predicted. Give them more tokens, or use fewer ranks"
    ]


def _replay(planned: PlannedStep) -> str:
    costs = planned.named.costs
    size = size_of_tree(planned.step.tree, chunk_size=costs.chunk_size, windows=costs.windows)
    if costs.chunk_size is None:
        return "no linear attention, so nothing is replayed"
    share = costs.tree.per_replayed * size.replayed / planned.sharing.shared
    return (
        f"as one microbatch: {size.rounds} rounds, {size.runs} runs, {size.replayed:,} rows replayed "
        f"({size.replayed / size.tokens:.2%} of the distinct tokens, {share:.3%} of the cost)"
    )


def _memory(planned: PlannedStep, largest: Microbatch) -> str:
    tree = planned.step.tree.restrict(largest.trajectories)
    edges = round(planned.step.loss_edges * tree.num_tokens / planned.step.tree.num_tokens)
    size = size_of_tree(tree, chunk_size=planned.named.costs.chunk_size, loss_edges=edges)
    measured = planned.named.saved_bytes_per_token
    memory = microbatch_memory(planned.named.dimensions, size, saved_bytes_per_token=measured)
    gib = 2.0**30
    return (
        f"largest microbatch: {size.tokens:,} tokens, about {memory.total(recompute=False) / gib:.1f} GiB, "
        f"{memory.total(recompute=True) / gib:.1f} GiB with recomputation "
        f"(states {memory.states / gib:.1f}, logits {memory.logits / gib:.1f}"
        f"{'' if measured is None else '; activations as measured'})"
    )


def _section(number: int, planned: PlannedStep) -> str:
    plan, tree = planned.plan, planned.step.tree
    rows = [("this plan", plan.makespan), *sorted(plan.peers.items(), key=lambda item: item[1])]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{planned.work(value)}</td>"
        f"<td>{value / plan.lower_bound if plan.lower_bound else 1:.4f}</td></tr>"
        for name, value in [*rows, ("lower bound", plan.lower_bound)]
    )
    facts = "".join(f"<li>{escape(line)}</li>" for line in _facts(planned))
    return (
        f"<h2>Step {number}: {planned.step.num_groups} groups, {tree.length_N.size} trajectories, "
        f"{tree.num_trajectory_tokens:,} tokens, {tree.num_tokens:,} distinct; "
        f"{plan.ranks} ranks &times; {plan.num_slots} slots</h2>\n{_svg(planned)}\n"
        f"<table><tr><th>plan</th><th>makespan</th><th>to lower bound</th></tr>{cells}</table>\n<ul>{facts}</ul>"
    )


def _svg(planned: PlannedStep) -> str:
    plan = planned.plan
    shown = max(1, min(plan.ranks, MAX_CELLS_DRAWN // plan.num_slots))
    width, row = 1000.0, 14 if shown <= 64 else 4
    scale = width / plan.makespan if plan.makespan else 0.0
    slowest = [max(m.predicted_work for m in column) for column in zip(*plan.slots, strict=True)]
    parts = []
    for y, rank in enumerate(plan.slots[:shown]):
        x = 0.0
        for slot, (microbatch, most) in enumerate(zip(rank, slowest, strict=True)):
            name = "slowest" if microbatch.predicted_work == most else "cell"
            label = (
                f"rank {y}, slot {slot}: {planned.work(microbatch.predicted_work)}, {microbatch.num_tokens:,} tokens, "
                f"{len(microbatch.trajectories)} trajectories"
            )
            parts.append(
                f'<rect class="{name}" x="{x:.2f}" y="{y * row}" width="{microbatch.predicted_work * scale:.2f}" '
                f'height="{row - 1}"><title>{label}</title></rect>'
            )
            # With barriers the next slot begins when the slowest has ended.
            x += ((most if plan.barrier else microbatch.predicted_work) + plan.overhead) * scale
    note = f"<p>The first {shown} of {plan.ranks} ranks.</p>" if shown < plan.ranks else ""
    return f'<svg viewBox="0 0 {width:.0f} {shown * row}" role="img">{"".join(parts)}</svg>{note}'
