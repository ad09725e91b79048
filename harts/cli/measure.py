"""Times microbatches of a model on a device and fits what each part of them costs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from harts.cli.load_model import load_model
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.flat import FlatLayout, flat_layout
from harts.layout.packed import PackedLayout, pack
from harts.logprobs import linear_logprobs
from harts.models import TreeModel, prepare
from harts.models.dimensions import model_dimensions
from harts.plan.calibration import Calibration, Fit, Sample, busy, fit
from harts.plan.cost import ModelDimensions
from harts.plan.size import MicrobatchSize, size_of_flat, size_of_tree
from harts.tree import PrefixTree, build_prefix_tree

REPEATS = 5
HELD_OUT_EVERY = 4


@contextmanager
def _tiny_numbers_as_zeros() -> Iterator[None]:
    """On a CPU: random weights bring gradients below 1e-38, where each costs ten others; trained ones do not."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@_tiny_numbers_as_zeros()  # before any tensor is made: threads keep the mode that they were started with
def measure(
    name: str, *, device: str, max_tokens: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Calibration:
    """Time microbatches of a model and fit its costs.

    Args:
        name: Of the model, as `--model` takes it.
        device: Where it runs.
        max_tokens: Of the largest microbatch.
        progress: Called with how many passes of how many are done. The first pass over all microbatches of an execution
            compiles what runs, which takes minutes on a GPU.
    """
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = prepare(load_model(name, dtype=dtype, device=device))
    dimensions = model_dimensions(model.module.config, bytes_per_element=dtype.itemsize)
    designs = [_next_to_nothing(), *_designs(max_tokens, model.vocab_size)]
    passes = [_executions(batch, tree, model, dimensions, max_tokens) for batch, tree in designs]
    total = 2 * len(passes) * (REPEATS + 1)
    done = itertools.count(1)
    samples = {
        execution: _time(model, [both[execution] for both in passes], lambda: progress(next(done), total))
        for execution in ("tree", "flat")
    }
    largest = max((both["tree"][0] for both in passes), key=lambda layout: layout.num_tokens)
    on_gpu = model.device.type == "cuda"
    return Calibration(
        model=name,
        device=torch.cuda.get_device_name(device) if on_gpu else f"{device}, {torch.get_num_threads()} threads",
        dtype=str(dtype).removeprefix("torch."),
        dimensions=dimensions,
        tree=_fit(samples["tree"], on_gpu=on_gpu),
        flat=_fit(samples["flat"], on_gpu=on_gpu),
        saved_bytes_per_token=_saved_bytes(largest, model) / largest.num_tokens,
    )


def _fit(samples: list[Sample], *, on_gpu: bool) -> Fit:
    """Of all but the first, which holds next to nothing: a GPU is idle while the host starts it."""
    least = samples[0].seconds if on_gpu else 0.0
    samples = busy(samples[1:], least)
    held_out = samples[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    fitted = [s for i, s in enumerate(samples) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return fit(fitted, held_out=held_out, least=least)


def _next_to_nothing() -> tuple[TrajectoryBatch, PrefixTree]:
    """Two trajectories that share a token."""
    batch = TrajectoryBatch.of([Trajectory.of([0, token], loss_mask=[False, True]) for token in (0, 1)])
    return batch, build_prefix_tree(batch)


def _designs(max_tokens: int, vocab_size: int) -> Iterator[tuple[TrajectoryBatch, PrefixTree]]:
    """Microbatches that differ in everything that has a cost of its own."""
    rng = np.random.default_rng(0)
    for quarters in (1, 2, 3, 4):
        tokens = max_tokens * quarters // 4
        # Single trajectory; bush at the root; bush at the end; comb with a branch every few tokens.
        for count, shared in ((1, 0.0), (8, 0.0), (2, 0.5), (6, 0.8), (12, 0.9), (8, -1.0), (24, -1.0)):
            trained = (0.02, 0.3, 1.0)[int(rng.integers(3))]
            words = _words(rng, tokens, count, shared, vocab_size)
            trajectories = [_trajectory(word, trained, rng) for word in words]
            batch = TrajectoryBatch.of(trajectories)
            yield batch, build_prefix_tree(batch)


def _words(rng: np.random.Generator, tokens: int, count: int, shared: float, vocab_size: int) -> list[np.ndarray]:
    if shared >= 0:
        trunk = rng.integers(0, vocab_size, int(tokens * shared))
        own = max(2, int((tokens - trunk.size) / count))
        return [np.concatenate([trunk, rng.integers(0, vocab_size, own)]) for _ in range(count)]
    half = tokens // 2
    trunk = rng.integers(0, vocab_size, half)
    own = max(2, half // count)
    places = np.linspace(half // (count + 1), half, count).astype(int)
    return [np.concatenate([trunk[:place], rng.integers(0, vocab_size, own)]) for place in places]


def _trajectory(word: np.ndarray, trained: float, rng: np.random.Generator) -> Trajectory:
    mask = rng.random(word.size) < trained
    mask[0], mask[-1] = False, True
    return Trajectory.of(word, loss_mask=mask)


def _executions(
    batch: TrajectoryBatch, tree: PrefixTree, model: TreeModel, dimensions: ModelDimensions, max_tokens: int
) -> dict[str, tuple[PackedLayout | FlatLayout, MicrobatchSize]]:
    packed = pack(tree, batch, model.needs).to(model.device)
    windows = dimensions.windows
    size = size_of_tree(
        tree, chunk_size=dimensions.chunk_size, windows=windows, loss_edges=packed.edges.target_E.numel()
    )
    # As many whole trajectories as the limit allows, so that flat microbatches are no larger than those on trees.
    most = max(1, min(batch.num_trajectories, max_tokens // int(batch.length_N.max())))
    # 1, 4, 16, ...: kernels of others are compiled and tuned anew for every number of rows.
    members = np.arange(4 ** ((most.bit_length() - 1) // 2))
    flat = flat_layout(batch, members).to(model.device)
    computed_N = np.full(members.size, flat.token_ids_NL.shape[1])
    flat_size = size_of_flat(
        computed_N,
        has_linear_attention=dimensions.chunk_size is not None,
        windows=windows,
        loss_edges=flat.edges.target_E.numel(),
    )
    return {"tree": (packed, size), "flat": (flat, flat_size)}


def _time(
    model: TreeModel, passes: list[tuple[PackedLayout | FlatLayout, MicrobatchSize]], after_each: Callable[[], None]
) -> list[Sample]:
    """The fastest of some passes of each microbatch, after one that is not timed.

    The repetitions go over all microbatches in turn, so that a slow moment of the device does not fall on one of them.
    """
    seconds: list[list[float]] = [[] for _ in passes]
    for _ in range(REPEATS + 1):
        for times, (layout, _) in zip(seconds, passes, strict=True):
            times.append(_seconds(model, layout))
            after_each()
    return [Sample(size=size, seconds=min(times[1:])) for (_, size), times in zip(passes, seconds, strict=True)]


def _seconds(model: TreeModel, layout: PackedLayout | FlatLayout) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    # One thread's own time leaves out what other jobs on a shared machine take.
    alone = model.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    wait()
    begin = clock()
    logprob_E, _ = linear_logprobs(model.hidden_states(layout), model.head, layout.edges, logit_scale=model.logit_scale)
    logprob_E.sum().backward()
    wait()
    seconds = clock() - begin
    model.module.zero_grad()
    return seconds


def _saved_bytes(layout: PackedLayout | FlatLayout, model: TreeModel) -> int:
    """What autograd keeps for a microbatch."""
    parameters = {p.untyped_storage().data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        # Attached, an output that its own operation saves would hold the graph that holds it, for good.
        return tensor.detach()

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden_states(layout)
    return sum(kept.values())
