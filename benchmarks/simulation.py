"""Plays plans for 8 to 10,000 ranks: efficiency, planning time, and what limits them.

    python -m benchmarks.simulation --json                                reports/simulation.md and .svg
    python -m benchmarks.simulation --calibration default:qwen3_next      with costs counted from a configuration
    python -m benchmarks.simulation --quick --no-report                   a minute

Efficiency is the time of the step's distinct tokens, spread evenly over the ranks, over the time of the step. Plans
pass the checks of benchmarks.planner before they are played.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.evidence import markdown_table, provenance, report_file
from benchmarks.planner import Row, checked_plan, warm_up
from harts.cli.model_names import find_costs
from harts.plan.simulate import WORKLOADS, play
from harts.plan.size import size_of_tree

CALIBRATION = Path(__file__).parent / "calibrations" / "h200_qwen3_5_1b.json"
"""`harts calibrate --model benchmarks/models/qwen3_5_1b.json --device cuda --max-tokens 32768`."""
MAX_TOKENS = 262_144
"""Distinct tokens of a microbatch."""
JITTER = 0.02
"""Of the second playback: ranks run 2% faster or slower, microbatch by microbatch."""
GRID = {10_000: (8, 64, 512, 4096), 100_000: (64, 512, 4096, 10_000), 1_000_000: (4096, 10_000)}
QUICK = {2000: (8, 64)}


def main() -> None:
    """Play the grid and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--quick", action="store_true", help="a small grid")
    parser.add_argument(
        "--calibration",
        default=str(CALIBRATION),
        help="what `harts calibrate` wrote, or any --model of harts plan (an H200's, unless given)",
    )
    parser.add_argument("--no-report", action="store_true", help="leave the report as it is")
    options = parser.parse_args()
    warm_up()
    rows, costs = [], describe(options.calibration)
    for row in simulate(options.calibration, QUICK if options.quick else GRID):
        rows.append(row)
        if not options.json:
            print(row, flush=True)
        if not options.no_report:  # after every row, since the grid takes a while
            draw(rows, report_file("simulation.svg"))
            write_report(rows, costs)
    if options.json:
        print(json.dumps({"rows": rows, **provenance()}))


def simulate(model: str, grid: dict[int, tuple[int, ...]]) -> Iterator[Row]:
    """One row for each workload, number of trajectories and number of ranks."""
    named = find_costs(model)
    for trajectories, all_ranks in grid.items():
        for workload, make in WORKLOADS.items():
            tree = make(trajectories)
            size = size_of_tree(tree, chunk_size=named.costs.chunk_size, windows=named.costs.windows)
            cost = named.costs.tree.for_planner(size, windows=named.costs.windows)
            for ranks in all_ranks:
                plan, seconds = checked_plan(tree, cost, ranks, MAX_TOKENS)
                played = play(plan, tree, named.costs)
                uneven = play(plan, tree, named.costs, jitter=JITTER)
                yield {
                    "workload": workload,
                    "trajectories": trajectories,
                    "distinct tokens": tree.num_tokens,
                    "ranks": ranks,
                    "slots": plan.num_slots,
                    "efficiency": played.useful,
                    "with 2% jitter": uneven.useful,
                    "repeated": played.repeated,
                    "passes": max(played.passes, 0.0),
                    "waiting": played.waiting,
                    "T/LB": plan.makespan / plan.lower_bound,
                    "planning CPU s": seconds,
                    "limited by": played.limit,
                }


def describe(model: str) -> str:
    """Where the costs of a name come from."""
    calibration = find_costs(model).calibration
    if calibration is None:
        return model
    most = max(sample.size.tokens for sample in calibration.tree.held_out)
    return (
        f"{Path(model).name}, fitted on {calibration.device} in {calibration.dtype}; what it predicted was measured up "
        f"to {most:,} tokens a microbatch"
    )


def draw(rows: list[Row], path: Path) -> None:
    """Efficiency and planning time against ranks."""
    import matplotlib as mpl

    mpl.use("svg")
    # Text stays text and names do not change from run to run, so that two reports can be compared.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "harts"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4))
    styles = {10_000: ":", 100_000: "--", 1_000_000: "-"}
    colours = dict(zip(WORKLOADS, ("#3b6fb6", "#d2691e", "#3a8f5c"), strict=True))
    for workload in WORKLOADS:
        for trajectories in dict.fromkeys(row["trajectories"] for row in rows):
            chosen = [r for r in rows if (r["workload"], r["trajectories"]) == (workload, trajectories)]
            ranks = [row["ranks"] for row in chosen]
            label = f"{workload}, {trajectories:,}"
            style = {"color": colours[workload], "linestyle": styles.get(trajectories, "-"), "marker": "o", "ms": 3}
            axes[0].plot(ranks, [row["efficiency"] for row in chosen], label=label, **style)
            axes[1].plot(ranks, [row["planning CPU s"] for row in chosen], **style)
    axes[0].set(xscale="log", xlabel="ranks", ylabel="efficiency", ylim=(0, 1.02))
    axes[1].set(xscale="log", yscale="log", xlabel="ranks", ylabel="planning, CPU seconds")
    axes[0].legend(fontsize=7, loc="lower left", title="workload, trajectories", title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_report(rows: list[Row], costs: str) -> None:
    """Write reports/simulation.md."""
    facts = "\n".join(f"- {name}: {value}" for name, value in provenance().items())
    rows = sorted(rows, key=lambda row: list(WORKLOADS).index(str(row["workload"])))
    shown = [
        {name: f"{value:.3f}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    text = f"""# Many ranks, simulated

{facts}
- costs: {costs}
- limit: {MAX_TOKENS:,} distinct tokens a microbatch; barriers after every slot

![efficiency and planning time against ranks](simulation.svg)

Efficiency is the time of the step's distinct tokens, spread evenly over the ranks, over the time of the step. What is
missing to 1 are prefixes that several microbatches compute (`repeated`), overheads, rounds and states (`passes`), and
ranks that wait (`waiting`). `with 2% jitter`: every microbatch takes a time that varies by 2%.

{markdown_table(shown)}
"""
    report_file("simulation.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
