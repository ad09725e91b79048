"""The planner against its bars: near the lower bound, never worse than its portfolio, fast at 100,000 trajectories.

    python -m benchmarks.planner --json                               all bars, and reports/planner.md
    python -m benchmarks.planner --shapes FOLDER                      real tree shapes too (*.jsonl.gz)
    python -m benchmarks.planner --quick --no-report                  a minute

Every plan is checked before a figure of it is used: each trajectory once, the limit kept, work and tokens recounted
from the microbatches' own trees, no peer shorter, the bound not passed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import markdown_table, provenance, report_file
from harts.cli.model_names import find_costs
from harts.cli.steps import read_steps
from harts.data.readers import read
from harts.plan import CostModel, Plan, capacity, make_plan
from harts.plan.bounds import lower_bound
from harts.plan.pack import FIRST_FIT
from harts.plan.problem import make_problem
from harts.plan.simulate import microbatch_trees, per_call, play
from harts.plan.size import size_of_tree
from harts.plan.slots import recount
from harts.tree import PrefixTree
from harts.tree.lcp import sort_tokens
from tests.plan.families import COST, FAMILIES

Row = dict[str, object]
ROUNDING = 1 + 1e-5
"""Peers and bounds are counted in integers, off by so much of a makespan at 10^6 trajectories on 10^4 ranks."""
MODEL = "default:qwen3_next"
FORBIDDEN = "forbidden by"
"""Begins the reason of a bar that no plan can hold."""
WORKLOADS = (
    *("swe_calls_last5", "tau_airline_calls", "mini_swe_calls_last5"),
    *("swe_calls", "swe_final", "tau_airline_final"),
)


def main() -> None:
    """Run the bars and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller instances")
    parser.add_argument("--seeds", type=int, default=6, help="of each family and number of ranks")
    parser.add_argument("--large", action="store_true", help="also sort 10^9 token ids (8 GB)")
    parser.add_argument("--shapes", type=Path, help="folder of *.jsonl.gz tree shapes")
    parser.add_argument("--no-report", action="store_true", help="leave reports/planner.md as it is")
    options = parser.parse_args()
    warm_up()
    tables = {
        "families": list(families(seeds=1 if options.quick else options.seeds, leaves=200 if options.quick else 500)),
        "scale": list(scale(10_000 if options.quick else 100_000)),
        "packing": list(packing([1000, 10_000] if options.quick else [1000, 10_000, 100_000])),
        "sorting": list(sorting([10**7] if options.quick else [10**8] + [10**9] * options.large)),
    }
    if options.shapes is not None:
        tables["shapes"] = list(shapes(options.shapes, ranks=(8,) if options.quick else (8, 32)))
        tables["replay"] = list(replay(options.shapes))
    bars = judge(tables)
    if not options.no_report:
        write_report(tables, bars)
    if options.json:
        print(json.dumps({"bars": bars, **tables, **provenance()}))
    else:
        print(markdown_table(bars))


def warm_up() -> None:
    """Compile, or load from the cache, before anything is timed."""
    for family, leaves, ranks in (("agent", 60, 4), ("pareto", 6000, 32)):  # one that is annealed and one that is not
        tree = FAMILIES[family](np.random.default_rng(0), leaves)
        checked_plan(tree, COST, ranks, 2 * int(tree.length_N.max()))
    next(packing([1000]))
    sort_tokens(np.arange(100, dtype=np.int32), np.array([0, 50, 100]))


def checked_plan(tree: PrefixTree, cost: CostModel, ranks: int, limit: int) -> tuple[Plan, float]:
    """A plan whose properties hold, and the seconds of processor time it took (other jobs do not count).

    Raises:
        SystemExit: If one does not hold. No figure of a wrong plan is worth printing.
    """
    begin = time.process_time()
    plan = make_plan(tree, max_tokens_per_microbatch=limit, cost=cost, ranks=ranks)
    seconds = time.process_time() - begin
    microbatches = [m for rank in plan.slots for m in rank]
    placed = sorted(number for m in microbatches for number in m.trajectories)
    parts = [(m, part) for m, part in zip(microbatches, microbatch_trees(plan, tree), strict=True) if part is not None]
    checks = {
        "each trajectory in one microbatch": placed == sorted(tree.order_N.tolist()),
        "as many slots on every rank": len({len(rank) for rank in plan.slots}) == 1 and len(plan.slots) == ranks,
        "tokens within the limit": all(m.num_tokens <= limit for m in microbatches),
        "tokens recounted": all(part.num_tokens == m.num_tokens for m, part in parts),
        "work recounted": all(math.isclose(cost.tree_work(p), m.predicted_work, rel_tol=1e-9) for m, p in parts),
        "no peer is shorter": all(plan.makespan <= peer * ROUNDING for peer in plan.peers.values()),
        "the bound holds": plan.lower_bound <= plan.makespan * ROUNDING,
    }
    failed = [name for name, holds in checks.items() if not holds]
    if failed:
        raise SystemExit(f"A plan of {tree.length_N.size} trajectories on {ranks} ranks fails: {', '.join(failed)}.")
    return plan, seconds


def families(*, seeds: int, leaves: int) -> Iterator[Row]:
    """Six kinds of steps, three numbers of ranks, several seeds, twice the longest trajectory a microbatch."""
    for name, make in FAMILIES.items():
        for ranks in (4, 8, 16):
            for seed in range(seeds):
                tree = make(np.random.default_rng(seed), leaves)
                plan, seconds = checked_plan(tree, COST, ranks, 2 * int(tree.length_N.max()))
                best_peer = min(plan.peers, key=lambda peer: plan.peers[peer])
                yield {
                    "family": name,
                    "ranks": ranks,
                    "seed": seed,
                    "T/LB": plan.makespan / plan.lower_bound,
                    "best peer": best_peer,
                    "its T/LB": plan.peers[best_peer] / plan.lower_bound,
                    "CPU seconds": seconds,
                }


def scale(trajectories: int) -> Iterator[Row]:
    """Large steps of every kind."""
    rng = np.random.default_rng(0)
    first = ("grpo", "pareto")  # so that their draws stay those of earlier reports
    trees = {name: FAMILIES[name](rng, trajectories) for name in (*first, *sorted(FAMILIES.keys() - first))}
    trees["per-call"] = per_call(trajectories)
    for name, tree in trees.items():
        for ranks in (64, 256):
            plan, seconds = checked_plan(tree, COST, ranks, 2 * int(tree.length_N.max()))
            yield {
                "step": name,
                "trajectories": tree.length_N.size,
                "distinct tokens": tree.num_tokens,
                "ranks": ranks,
                "slots": plan.num_slots,
                "T/LB": plan.makespan / plan.lower_bound,
                "T/LB if slots were even": even(plan) / plan.lower_bound,
                "P95 imbalance": plan.imbalance_p95,
                "CPU seconds": seconds,
            }


def packing(sizes: list[int]) -> Iterator[Row]:
    """What packing repeats under the token limit alone: by first fit, and with alternatives."""
    for family in ("search_tree", "pareto"):
        for size in sizes:
            tree = FAMILIES[family](np.random.default_rng(0), size)
            limit = 2 * int(tree.length_N.max())
            problem = make_problem(tree, cost=COST, ranks=1, limit=limit, barrier=False)
            bound = lower_bound(problem)
            row: Row = {
                "step": family,
                "trajectories": tree.length_N.size,
                "bound of work / distinct": bound.work / problem.total_work,
                "bound of bins": bound.slots,
            }
            for name, rule in (("first fit", FIRST_FIT), ("alternatives", capacity.BEAM)):
                begin = time.process_time()
                bin_J = capacity.pack_tokens(problem, rule=rule)
                seconds = time.process_time() - begin
                work_B, tokens_B = recount(problem, bin_J)
                if tokens_B.max() > limit:
                    raise SystemExit(f"A bin of {family} holds more than {limit} tokens.")
                row |= {
                    f"{name}: work / distinct": int(work_B.sum()) / problem.total_work,
                    f"{name}: bins": work_B.size,
                    f"{name}: CPU seconds": seconds,
                }
            yield row


def even(plan: Plan) -> float:
    """Makespan if the work of the microbatches, repeated prefixes included, were spread evenly."""
    work = math.fsum(m.predicted_work for rank in plan.slots for m in rank)
    return work / plan.ranks + plan.num_slots * plan.overhead


def sorting(sizes: list[int]) -> Iterator[Row]:
    """Token ids into sorted order and common prefixes: trajectories of 10,000 tokens, 16 of a prompt."""
    for size in sizes:
        rng = np.random.default_rng(0)
        count, length = size // 10_000, 10_000
        tokens_NL = rng.integers(0, 150_000, (count, length), dtype=np.int32)
        for begin in range(0, count, 16):
            tokens_NL[begin : begin + 16, : length // 2] = tokens_NL[begin, : length // 2]
        tokens_NL = tokens_NL[rng.permutation(count)]
        offsets = np.arange(count + 1) * length
        begin_time = time.process_time()
        order_N, lcp_N = sort_tokens(tokens_NL.reshape(-1), offsets)
        seconds = time.process_time() - begin_time
        expected = (np.diff(order_N, prepend=-1) != 0).all() and (np.bincount(order_N) == 1).all()
        shared = int((lcp_N >= length // 2).sum())
        if not expected or shared != count - -(-count // 16):
            raise SystemExit(f"Sorting {size} ids is wrong: {shared} neighbours share a prompt.")
        yield {"token ids": size, "trajectories": count, "CPU seconds": seconds, "ids a second": size / seconds}


def shapes(folder: Path, *, ranks: tuple[int, ...]) -> Iterator[Row]:
    """Real tree shapes, each file as one step, with the costs of a model's dimensions."""
    for name in WORKLOADS:
        (step,) = read_steps(read(folder / f"{name}.jsonl.gz"), None)
        tree = step.tree
        named = find_costs(MODEL)
        size = size_of_tree(tree, chunk_size=named.costs.chunk_size, loss_edges=step.loss_edges)
        cost = named.costs.tree.for_planner(size)
        for count in ranks:
            plan, seconds = checked_plan(tree, cost, count, max(65_536, int(tree.length_N.max())))
            computed = sum(m.num_tokens for rank in plan.slots for m in rank)
            best_peer = min(plan.peers, key=lambda peer: plan.peers[peer])
            yield {
                "workload": name,
                "ranks": count,
                "slots": plan.num_slots,
                "ratio": tree.num_trajectory_tokens / tree.num_tokens,
                "ratio kept": tree.num_trajectory_tokens / computed,
                "T/LB": plan.makespan / plan.lower_bound,
                "best peer": f"{best_peer} {plan.peers[best_peer] / plan.lower_bound:.3f}",
                "P95 imbalance": plan.imbalance_p95,
                "why above 1%": why_unbalanced(plan, tree, cost),
                "CPU seconds": seconds,
            }


def why_unbalanced(plan: Plan, tree: PrefixTree, cost: CostModel) -> str:
    """What keeps the P95 imbalance above 1%, or "-"; begins with FORBIDDEN if no plan could do better."""
    if plan.imbalance_p95 <= 0.01:
        return "-"
    work = sum(m.predicted_work for rank in plan.slots for m in rank)
    mean = work / plan.ranks / plan.num_slots
    ends = np.append(tree.lcp_N[1:] < tree.length_N[:-1], True)
    length_J = tree.length_N[ends]
    least = least_imbalance(length_J, cost, ranks=plan.ranks, limit=plan.max_tokens_per_microbatch)
    if least > 0.01 and plan.num_slots < 20:  # of fewer than 20 slots the 95th percentile is the largest
        longest = int(length_J.max())
        return (
            f"{FORBIDDEN} the longest trajectory: its {longest:,} tokens alone are "
            f"{float(cost.path_work(longest)) / mean:.2f} x the mean microbatch, and however the other ranks are "
            f"filled within the limit, the imbalance of its slot is at least {least:.1%}"
        )
    bound = max((plan.lower_bound - plan.num_slots * plan.overhead) * plan.ranks / work - 1, 0.0)
    # What a leaf shares with the leaf before is the least of the common prefixes since.
    lcp_J = np.minimum.reduceat(tree.lcp_N, np.append(0, np.flatnonzero(ends)[:-1] + 1))
    own_J = cost.path_work(length_J) - cost.path_work(lcp_J)
    return (
        f"no bound forbids it (mean imbalance at least {bound:.2%}): "
        f"{length_J.size / plan.ranks / plan.num_slots:.1f} leaves a microbatch, of which the median alone is "
        f"{np.median(own_J) / mean:.1%} of it"
    )


def least_imbalance(length_J: NDArray[np.int64], cost: CostModel, *, ranks: int, limit: int) -> float:
    """How much the slot of the longest trajectory is out of balance at least, in every plan.

    A trajectory that another contains runs with it; apart it would only be computed again.

    Of the microbatches of a slot, at most one has the longest trajectory, at most two have one of the two longest, and
    so on. One of `limit` tokens whose longest trajectory has `length` tokens does at most the work of that trajectory
    and of `limit - length` tokens as deep as its last. The largest over the mean is least if the longest trajectory is
    alone and the others reach their most, but not more than its work.

    Args:
        length_J: [J] int64. Lengths of the trajectories that no other contains.
        cost: Of their tokens.
        ranks: >= 1.
        limit: Tokens of a microbatch.
    """
    length_R = np.sort(length_J)[::-1][:ranks]
    work_R = cost.path_work(length_R)
    most_R = work_R + (limit - length_R) * (work_R - cost.path_work(length_R - 1))
    most_R = np.minimum(most_R, work_R[0])
    return float(work_R[0] * ranks / most_R.sum() - 1)


def replay(folder: Path) -> Iterator[Row]:
    """What planning with replayed rows changes, played with all costs on 8 ranks."""
    named = find_costs(MODEL)
    for name in WORKLOADS:
        (step,) = read_steps(read(folder / f"{name}.jsonl.gz"), None)
        size = size_of_tree(step.tree, chunk_size=named.costs.chunk_size, loss_edges=step.loss_edges)
        played = []
        for with_replay in (False, True):
            cost = named.costs.tree.for_planner(size, with_replay=with_replay)
            plan, _ = checked_plan(step.tree, cost, 8, max(65_536, int(step.tree.length_N.max())))
            played.append(play(plan, step.tree, named.costs).seconds)
        share = named.costs.tree.per_replayed * size.replayed / named.costs.tree.predict(size)
        yield {
            "workload": name,
            "replayed / distinct": f"{size.replayed / size.tokens:.2%}",
            "share of the cost": f"{share:.3%}",
            "step if planned for": f"{played[1] / played[0] - 1:+.3%}",
        }


def judge(tables: dict[str, list[Row]]) -> list[Row]:
    """Each bar, what was reached, and whether it holds."""
    bars: list[Row] = []

    def bar(name: str, reached: float, limit: float, detail: str = "") -> None:
        bars.append({"bar": name, "reached": reached, "limit": limit, "holds": reached <= limit, "where": detail})

    for family, rows in groupby(tables["families"], key=lambda row: row["family"]):
        ratios = [float(row["T/LB"]) for row in rows]  # type: ignore[arg-type]
        bar(f"T/LB, mean of {family}", float(np.mean(ratios)), 1.05)
        bar(f"T/LB, largest of {family}", max(ratios), 1.16)
    for row in tables["scale"]:
        where = f"{row['step']}, {row['ranks']} ranks"
        bar("T/LB at scale", float(row["T/LB"]), 1.015, where)  # type: ignore[arg-type]
        bar("CPU seconds at scale", float(row["CPU seconds"]), 1.5, where)  # type: ignore[arg-type]
    for row in tables["sorting"]:
        size = int(row["token ids"])  # type: ignore[call-overload]
        bar("CPU seconds to sort", float(row["CPU seconds"]), 3e-9 * size, f"{size:.0e} token ids")  # type: ignore[arg-type]
    for row in tables.get("shapes", []):
        if row["workload"] in WORKLOADS[:3]:
            where = f"{row['workload']}, {row['ranks']} ranks"
            bar("P95 imbalance", float(row["P95 imbalance"]), 0.01, where)  # type: ignore[arg-type]
            reason = str(row["why above 1%"])
            if reason.startswith(FORBIDDEN):
                bars[-1].update({"holds": "forbidden", "where": f"{where}: {reason}"})
    return bars


def write_report(tables: dict[str, list[Row]], bars: list[Row]) -> None:
    """Write reports/planner.md."""
    facts = "\n".join(f"- {name}: {value}" for name, value in provenance().items())
    titles = {
        "families": "Families (limit: twice the longest trajectory)",
        "scale": "Large steps",
        "packing": "Packing under the token limit alone (twice the longest trajectory)",
        "sorting": "Token ids to order and common prefixes",
        "shapes": f"Real tree shapes (costs of {MODEL}, limit: 65,536 tokens or the longest trajectory)",
        "replay": "Planning with replayed rows (8 ranks, played with all costs)",
    }
    sections = "\n\n".join(f"## {titles[name]}\n\n{markdown_table(rows)}" for name, rows in tables.items())
    held = sum(row["holds"] is True for row in bars)
    forbidden = sum(row["holds"] == "forbidden" for row in bars)
    verdict = (
        f"{held} of {len(bars)} bars hold; {forbidden} are forbidden by a bound, {len(bars) - held - forbidden} missed."
    )
    text = f"# Planner\n\n{facts}\n\n{verdict}\n\n## Bars\n\n{markdown_table(bars)}\n\n{sections}\n"
    report_file("planner.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
