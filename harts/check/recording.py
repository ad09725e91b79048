"""One execution of a step with everything that is compared kept: log-probs, gradients, every mixing layer's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from harts.data import Trajectory, TrajectoryBatch
from harts.data.ragged import padded_length, ranges
from harts.layers.moe.statistics import RouterStatistics
from harts.layout.packed import flat_to_packed
from harts.layout.rounds import rounds_if_interior_states
from harts.models import TreeModel
from harts.models.registry import find_family
from harts.objective.streams import Objective
from harts.plan.plan import Microbatch, Plan
from harts.step import compute_logprobs, train_step
from harts.testing import gradients
from harts.tree import PrefixTree, build_prefix_tree

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Of a microbatch: its trajectories in order, and the row of each of their tokens in its outputs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recording:
    """What one execution computed, in the order of the trajectories, on the CPU."""

    logprobs_P: NDArray[np.float64]
    """[P] float64. Log-probs of the trained tokens."""
    hidden_FD: Tensor
    """[F, D]. What the LM head reads at every token of every trajectory."""
    layers: dict[str, Tensor]
    """Output of every layer that mixes tokens, [F, D], by module name (`#n` for the n-th further call of a shared
    one)."""
    gradients: dict[str, Tensor]
    """By parameter name; empty if not asked for."""
    experts: dict[str, Tensor]
    """[F, A] int64. Experts of every router, ascending, by module name; empty without mixtures of experts."""
    router: RouterStatistics | None
    """Loads and losses of the routers; None without them or without gradients."""
    num_rounds: int
    """As in `StepResult`; 0 without gradients."""
    num_rounds_e: int
    """Rounds of a tree if kernels also returned the states inside runs; 0 if flat or without linear attention."""
    num_replayed: int
    """As in `StepResult`; 0 without gradients."""


def mixing_layers(model: TreeModel) -> dict[str, str]:
    """Module name -> transformers class, of the layers that mix tokens."""
    family = find_family(model.module.config)
    original = dict(model.replaced)
    mixing = {*family.tree_classes, *family.attention_classes}
    kinds = {name: original.get(module, type(module)) for name, module in model.module.named_modules()}
    return {name: kind.__name__ for name, kind in kinds.items() if kind in mixing}


def one_by_one(batch: TrajectoryBatch) -> Plan:
    """Flat, every trajectory a microbatch of its own."""
    return _plan([[i] for i in range(batch.num_trajectories)], sharing=False)


def padded_together(batch: TrajectoryBatch, size: int) -> Plan:
    """Flat, `size` trajectories a microbatch, last ones first: other matrix shapes, another order of summation."""
    order = list(range(batch.num_trajectories))[::-1]
    return _plan([order[i : i + size] for i in range(0, len(order), size)], sharing=False)


def one_tree(tree: PrefixTree) -> Plan:
    """All trajectories in one microbatch."""
    return _plan([tree.order_N.tolist()], sharing=True)


def _plan(members: list[list[int]], *, sharing: bool) -> Plan:
    microbatches = tuple(
        Microbatch(trajectories=tuple(m), num_tokens=0, num_trajectory_tokens=0, predicted_work=0.0) for m in members
    )
    return Plan(
        slots=(microbatches,),
        max_tokens_per_microbatch=0,
        sharing=sharing,
        barrier=True,
        overhead=0.0,
        lower_bound=0.0,
        peers={},
    )


def record(
    model: TreeModel, trajectories: Sequence[Trajectory], plan: Plan, objective: Objective | None = None
) -> Recording:
    """Run a step and keep what it computed.

    Args:
        model: Prepared, without gradients; it has none afterwards.
        trajectories: Of the step.
        plan: Of one rank; without sharing, every trajectory is computed alone.
        objective: Whose gradients to keep; None runs forward only.
    """
    batch = TrajectoryBatch.of(trajectories)
    execution = "tree" if plan.sharing else "flat"
    result = None
    with _outputs(model, mixing_layers(model)) as microbatches:
        if objective is None:
            logprobs_P = compute_logprobs(model, trajectories, execution=execution, plan=plan)
        else:
            result = train_step(model, trajectories, objective, execution=execution, plan=plan)
            logprobs_P = result.logprobs_P
    kept = {} if objective is None else {name: g.cpu() for name, g in gradients(model.module).items()}
    model.module.zero_grad(set_to_none=True)
    tree, chunk_size = build_prefix_tree(batch), model.needs.chunk_size
    rows = list(rows_of_microbatches(batch, tree, plan))
    outputs = {name: in_order([m[name] for m in microbatches], rows, batch) for name in microbatches[0]}
    experts = {name: outputs.pop(name) for name in model.routing.layers}
    return Recording(
        logprobs_P=logprobs_P,
        hidden_FD=outputs.pop(""),
        layers=outputs,
        gradients=kept,
        experts=experts,
        router=None if result is None else result.router,
        num_rounds=0 if result is None else result.num_rounds,
        num_rounds_e=rounds_if_interior_states(tree, chunk_size) if plan.sharing and chunk_size is not None else 0,
        num_replayed=0 if result is None else result.num_replayed,
    )


@contextmanager
def _outputs(model: TreeModel, layers: dict[str, str]) -> Iterator[list[dict[str, Tensor]]]:
    """Collect, a microbatch at a time, the outputs of layers [rows, D], the experts of routers [rows, A], and under ""
    the outputs of the decoder."""
    done: list[dict[str, Tensor]] = []
    current: dict[str, Tensor] = {}

    def choose(name: str, output: Any) -> None:
        (experts,) = (tensor for tensor in output if not tensor.is_floating_point())
        current[name] = experts.sort(dim=-1).values.cpu()

    def finish(_module: nn.Module, _inputs: Any, output: Any) -> None:
        done.append({**current, "": output.last_hidden_state.detach().flatten(0, -2).cpu()})
        current.clear()

    modules = dict(model.module.named_modules())
    handles = [modules[n].register_forward_hook(lambda _m, _i, out, n=n: keep(current, n, out)) for n in layers]
    for name in model.routing.layers:
        handles.append(modules[name].register_forward_hook(lambda _m, _i, out, n=name: choose(n, out)))
    handles.append(model.module.get_decoder().register_forward_hook(finish))
    try:
        yield done
    finally:
        for handle in handles:
            handle.remove()


def keep(kept: dict[str, Tensor], name: str, output: Any) -> None:
    """Add what a call of a layer read or gave, [rows, D] on the CPU."""
    tensor = output[0] if isinstance(output, tuple) else output
    kept[next_call(kept, name)] = tensor.detach().flatten(0, -2).cpu()


def next_call(kept: dict[str, Tensor], name: str) -> str:
    """Under which key the next call of a layer is kept."""
    calls = sum(key.partition("#")[0] == name for key in kept)
    return f"{name}#{calls}" if calls else name


def rows_of_microbatches(batch: TrajectoryBatch, tree: PrefixTree, plan: Plan) -> Iterator[Rows]:
    """Where a plan's microbatches have the tokens of their trajectories."""
    for microbatch in plan.slots[0]:
        members = np.array(microbatch.trajectories, dtype=np.int64)
        if plan.sharing:
            part = tree.restrict(members).largest_first()  # as the step packs it
            yield part.order_N, flat_to_packed(part)
        else:
            length_N = batch.length_N[members]
            yield members, ranges(np.arange(members.size) * padded_length(int(length_N.max())), length_N)


def in_order(outputs: list[Tensor], rows: list[Rows], batch: TrajectoryBatch) -> Tensor:
    """[F, D] from the outputs of every microbatch."""
    ordered = outputs[0].new_empty(batch.token_ids_F.size, outputs[0].shape[-1])
    for output, (members, row) in zip(outputs, rows, strict=True):
        place = ranges(batch.offsets[members], batch.length_N[members])
        ordered[torch.from_numpy(place)] = output[torch.from_numpy(row)]
    return ordered
