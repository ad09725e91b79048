"""The check: tree and flat on one model and one set of rollouts, beside flat's own noise and a float64 truth."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from harts.check.differences import Differences, differences
from harts.check.equal_inputs import differences_on_equal_inputs
from harts.check.leak import leaks
from harts.check.own_layers import own_layers
from harts.check.recording import Recording, mixing_layers, one_by_one, one_tree, padded_together, record
from harts.check.report import CheckReport, LayerFigures, build_report
from harts.check.verdict import Compared
from harts.data import Trajectory, TrajectoryBatch
from harts.layers.moe.losses import RouterLosses
from harts.models import TreeModel, prepare
from harts.objective import Supervised
from harts.testing import float64_throughout
from harts.tree import build_prefix_tree

STEPS = ("flat", "flat again", "flat, padded", "flat, rounded", "tree", "equal inputs", "leak test", "float64 truth")
"""What `check_model` runs, in order; "flat, rounded" not in 16 bits, the truth only where it fits."""
NOISE = ("flat again", "flat, padded", "flat, rounded")
OBJECTIVE = Supervised()
"""Its gradient reaches every trained token of every trajectory with the same sign."""
PADDED_TOGETHER = 4


def check_model(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    *,
    truth: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> CheckReport:
    """Run tree and flat on a model and compare everything.

    Args:
        model: Not prepared, in training mode, without gradients; left as it was.
        trajectories: Some rollouts; all are computed as one tree.
        truth: Whether to run a float64 copy too. None: where it fits into memory twice over (weights, gradients).
        progress: Called with the name of each of `STEPS` before it runs.

    Raises:
        ValueError: If the model does not run on trees, or the trajectories do not fit it.
    """
    progress = progress or (lambda step: None)
    batch = TrajectoryBatch.of(trajectories)
    is_float64 = next(model.parameters()).dtype is torch.float64
    wanted = not is_float64 and (_fits(model) if truth is None else truth)
    true_model = _in_float64(model) if wanted else None
    with _precision(model, is_float64):
        prepared = _prepare(model)
        kinds = mixing_layers(prepared)
        try:
            recordings, layers = _run(prepared, trajectories, batch, progress)
        finally:
            prepared.restore()
    if true_model is not None:
        progress("float64 truth")
        with own_layers(true_model), float64_throughout():
            recordings["float64 truth"] = record(_prepare(true_model), trajectories, one_by_one(batch), OBJECTIVE)
    compared = _compare(recordings, batch, prepared)
    return build_report(compared, recordings["tree"], batch, kinds, layers)


def _run(
    model: TreeModel, trajectories: Sequence[Trajectory], batch: TrajectoryBatch, progress: Callable[[str], None]
) -> tuple[dict[str, Recording], LayerFigures]:
    """Record flat in every way and the tree, and look at layers by themselves."""
    batch.check_vocabulary(model.vocab_size)
    alone, together = one_by_one(batch), padded_together(batch, PADDED_TOGETHER)
    plans = {"flat": alone, "flat again": alone, "flat, padded": together, "flat, rounded": alone}
    plans["tree"] = one_tree(build_prefix_tree(batch))
    if torch.finfo(model.head.weight.dtype).bits == 16:
        del plans["flat, rounded"]
    recordings = {}
    for step, plan in plans.items():
        progress(step)
        with _moved_weights(model.module) if step == "flat, rounded" else nullcontext():
            recordings[step] = record(model, trajectories, plan, OBJECTIVE)
    progress("equal inputs")
    own = differences_on_equal_inputs(model, trajectories, {name: plans[name] for name in ("tree", "flat, padded")})
    progress("leak test")
    moved = leaks(model, trajectories, recordings["tree"])
    return recordings, LayerFigures(own=own["tree"], own_noise=own["flat, padded"], moved=moved)


def _prepare(model: PreTrainedModel) -> TreeModel:
    """With counts and losses of the routers where there are any; sequence-wise, which no plan changes."""
    prepared = prepare(model)
    if not prepared.routing.sites:
        return prepared
    return replace(prepared, router=RouterLosses(balance="sequence"))


def _compare(recordings: dict[str, Recording], batch: TrajectoryBatch, model: TreeModel) -> Compared:
    trained = torch.from_numpy(batch.trained_P)

    def against(actual: str, expected: str) -> Differences | None:
        if actual not in recordings or expected not in recordings:
            return None
        return differences(recordings[actual], recordings[expected], model, trained)

    tree = against("tree", "flat")
    noise = {name: pair for name in NOISE if (pair := against(name, "flat")) is not None}
    assert tree is not None
    return Compared(
        tree=tree,
        noise=noise,
        tree_truth=against("tree", "float64 truth"),
        flat_truth=against("flat", "float64 truth"),
        max_abs_logprob=float(np.abs(recordings["flat"].logprobs_P).max()),
        eps=torch.finfo(model.head.weight.dtype).eps,
    )


@contextmanager
def _moved_weights(model: nn.Module) -> Iterator[None]:
    """Every weight moved by up to half a unit in its last place, and put back bit for bit."""
    kept = [p.detach().clone() for p in model.parameters()]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for p in model.parameters():
            p.mul_(1 + torch.finfo(p.dtype).eps * (torch.rand(p.shape, dtype=p.dtype).to(p.device) - 0.5))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zip(model.parameters(), kept, strict=True):
                p.copy_(before)


@contextmanager
def _precision(model: PreTrainedModel, is_float64: bool) -> Iterator[None]:
    """What layers call where libraries that transformers binds to them cannot run, and float64 without casts."""
    layers = own_layers(model) if is_float64 or model.device.type == "cpu" else nullcontext()
    with layers, float64_throughout() if is_float64 else nullcontext():
        yield


def _fits(model: PreTrainedModel) -> bool:
    """Whether weights and gradients of a float64 copy take at most half of the free memory of the model's device."""
    needed = 16 * sum(p.numel() for p in model.parameters())
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * needed <= free


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    copied = copy.deepcopy(model).double()
    if copied.get_experts_implementation() is not None:
        copied.set_experts_implementation("eager")  # grouped matrix products know no float64
    return copied
