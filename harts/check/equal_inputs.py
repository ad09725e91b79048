"""Layers by themselves: what each that mixes tokens gives in the tree for the inputs that it has in flat.

From layer to layer, whatever differences there are grow into those of chance, so a whole model's say little about where
they began. On equal inputs a layer's own are left: of one that rounds, sums or cuts otherwise than flat's they are far
above those between flat and flat packed otherwise, however deep in the model it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harts.check.recording import Rows, in_order, keep, mixing_layers, next_call, one_by_one, rows_of_microbatches
from harts.data import Trajectory, TrajectoryBatch
from harts.data.ragged import ranges
from harts.models import TreeModel
from harts.plan.plan import Plan
from harts.step import compute_logprobs
from harts.tree import build_prefix_tree

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Passes:
    """Of every layer that mixes tokens, by module name (`#n` for the n-th further call of a shared one)."""

    inputs: Tensors
    """[F, D]."""
    outputs: Tensors
    """[F, D]."""


def differences_on_equal_inputs(
    model: TreeModel, trajectories: Sequence[Trajectory], plans: Mapping[str, Plan]
) -> dict[str, dict[str, float]]:
    """Run every layer that mixes tokens on the inputs that it has when trajectories are computed one by one.

    Tokens that trajectories share get the inputs of the first of them in the microbatch. A token is compared if its
    inputs, and those of all tokens before it in its trajectory, have the bits of flat's.

    Args:
        model: Prepared.
        trajectories: Of one step.
        plans: Of one rank, by name.

    Returns:
        By name of the plan, then of the layer: the norm of the difference of outputs, over that of flat's outputs.
    """
    batch = TrajectoryBatch.of(trajectories)
    flat = _run(model, trajectories, one_by_one(batch), None)
    found = {}
    for name, plan in plans.items():
        passes = _run(model, trajectories, plan, flat.inputs)
        found[name] = {layer: _difference(passes, flat, layer, batch) for layer in flat.outputs}
    return found


def _difference(actual: _Passes, expected: _Passes, layer: str, batch: TrajectoryBatch) -> float:
    is_same_F = (actual.inputs[layer] == expected.inputs[layer]).all(-1).numpy()
    for is_same in np.split(is_same_F, batch.offsets[1:-1]):  # views
        np.logical_and.accumulate(is_same, out=is_same)
    compared = torch.from_numpy(is_same_F)
    output, other = expected.outputs[layer][compared].double(), actual.outputs[layer][compared].double()
    size = output.norm().item()
    return (other - output).norm().item() / (size or 1.0)


def _run(model: TreeModel, trajectories: Sequence[Trajectory], plan: Plan, given: Tensors | None) -> _Passes:
    """Compute log-probs and keep what layers read and gave, after putting the inputs given in front of them."""
    batch = TrajectoryBatch.of(trajectories)
    rows = list(rows_of_microbatches(batch, build_prefix_tree(batch), plan))
    with _hooked(model, rows, batch, given) as microbatches:
        compute_logprobs(model, trajectories, execution="tree" if plan.sharing else "flat", plan=plan)

    def ordered(tensors: list[Tensors]) -> Tensors:
        return {name: in_order([m[name] for m in tensors], rows, batch) for name in tensors[0]}

    return _Passes(
        inputs=ordered([inputs for inputs, _ in microbatches]),
        outputs=ordered([outputs for _, outputs in microbatches]),
    )


@contextmanager
def _hooked(
    model: TreeModel, rows: list[Rows], batch: TrajectoryBatch, given: Tensors | None
) -> Iterator[list[tuple[Tensors, Tensors]]]:
    """Collect inputs and outputs of layers, [rows, D] on the CPU, a microbatch at a time."""
    done: list[tuple[Tensors, Tensors]] = []
    inputs: Tensors = {}
    outputs: Tensors = {}

    def before(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else options["hidden_states"]
        if given is not None:
            hidden = _put(hidden, given[next_call(inputs, name)], rows[len(done)], batch)
        keep(inputs, name, hidden)
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    def finish(*_: Any) -> None:
        done.append((dict(inputs), dict(outputs)))
        inputs.clear()
        outputs.clear()

    modules = dict(model.module.named_modules())
    handles = [model.module.get_decoder().register_forward_hook(finish)]
    for name in mixing_layers(model):
        handles.append(
            modules[name].register_forward_pre_hook(lambda _m, args, o, n=name: before(n, args, o), with_kwargs=True)
        )
        handles.append(modules[name].register_forward_hook(lambda _m, _i, output, n=name: keep(outputs, n, output)))
    try:
        yield done
    finally:
        for handle in handles:
            handle.remove()


def _put(hidden: Tensor, given_FD: Tensor, rows: Rows, batch: TrajectoryBatch) -> Tensor:
    """Hidden states with those of trajectories' tokens replaced; padding stays as it is."""
    members, row = rows
    place = ranges(batch.offsets[members], batch.length_N[members])
    filled, first = np.unique(row, return_index=True)
    replaced = hidden.flatten(0, -2).clone()
    replaced[torch.from_numpy(filled).to(hidden.device)] = given_FD[torch.from_numpy(place[first])].to(hidden.device)
    return replaced.view_as(hidden)
