"""One step across ranks beside the step of one process; threads, gloo and NCCL run the same."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import harts
from harts.data import Trajectory
from harts.data.exchange import Exchange
from harts.models.tiny import tiny_model
from harts.testing import assert_gradients_close, float64_throughout, gradients
from harts.train.distributed import ProcessGroupExchange, sum_gradients
from harts.train.ranks import compute_logprobs_across_ranks, train_step_across_ranks
from tests.cases import CASES, trajectories_of

NAMED = {case.name: case for case in CASES}
OBJECTIVE = harts.gspo(clip_low=0.2, clip_high=0.2, kl_coef=0.1, normalization="group")
"""Sequence-level ratios and normalisers by group: both need more than the tokens of one rank."""
PYTORCH = harts.Kernels(attention="sdpa", linear_attention="torch")
MODEL_TYPE, CASE = "qwen3_5_text", "depth_beyond_two"
"""Of the steps that processes run."""


def dealt(trajectories: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """Numbers of each rank's trajectories; the last of more than two ranks has none."""
    rank_N = np.random.default_rng(ranks).integers(0, ranks - 1 if ranks > 2 else ranks, len(trajectories))
    return [np.flatnonzero(rank_N == rank).tolist() for rank in range(ranks)]


def prepared(model_type: str, *, dtype: torch.dtype = torch.float64, device: str = "cpu") -> harts.TreeModel:
    """A tiny model; its weights are those of float32 in any type."""
    return harts.prepare(tiny_model(model_type).to(device, dtype), kernels=PYTORCH)


def arithmetic(model: harts.TreeModel) -> AbstractContextManager[object]:
    """Lifts casts to float32 from a model in float64."""
    return float64_throughout() if model.head.weight.dtype == torch.float64 else nullcontext()


def run(exchange: Exchange, model: harts.TreeModel, name: str, execution: harts.Execution) -> dict:
    """This rank's part of the step."""
    trajectories = trajectories_of(NAMED[name])
    numbers = dealt(trajectories, exchange.ranks)[exchange.rank]
    longest = max(len(t) for t in trajectories)
    with arithmetic(model):
        result = train_step_across_ranks(
            model,
            [trajectories[i] for i in numbers],
            OBJECTIVE,
            exchange,
            numbers=numbers,
            execution=execution,
            max_tokens_per_microbatch=2 * longest,
        )
        logprobs = compute_logprobs_across_ranks(
            model,
            [without_streams(trajectories[i]) if exchange.rank else trajectories[i] for i in numbers],
            exchange,
            numbers=numbers,
            execution=execution,
            max_tokens_per_microbatch=2 * longest,
        )
    # On a GPU other kernels may run where no gradients are asked for.
    granted = 0.0 if model.device.type == "cpu" else 100 * torch.finfo(model.head.weight.dtype).eps
    np.testing.assert_allclose(logprobs, result.logprobs_P, rtol=granted)
    return {"loss": result.loss, "logprobs": result.logprobs_P, "microbatches": result.num_microbatches}


def without_streams(trajectory: Trajectory) -> Trajectory:
    """What log-probs alone need: ranks may even differ in what else they carry."""
    return replace(trajectory, sampling_logprobs=None, ref_logprobs=None)


def check(
    model: harts.TreeModel, name: str, execution: harts.Execution, found: list[dict], summed: dict[str, Tensor]
) -> None:
    """Compare what all ranks found with one process, in float64."""
    trajectories = trajectories_of(NAMED[name])
    with float64_throughout():
        whole = harts.train_step(model, trajectories, OBJECTIVE, execution=execution)
    assert sum(part["loss"] for part in found) == pytest.approx(whole.loss, rel=1e-10, abs=1e-14)
    assert_gradients_close(on_cpu(gradients(model.module)), summed, ratio=1e-10)
    np.testing.assert_allclose(joined(trajectories, found), whole.logprobs_P, rtol=1e-10)


def check_float32(device: str, found: list[dict], summed: dict[str, Tensor]) -> None:
    """Ranks are as far from float64 as one process is, up to a factor: they add up in another order."""
    trajectories = trajectories_of(NAMED[CASE])
    steps: dict[torch.dtype, tuple[harts.StepResult, Tensor]] = {}
    for dtype in (torch.float64, torch.float32):
        model = prepared(MODEL_TYPE, dtype=dtype, device=device)
        with arithmetic(model):
            result = harts.train_step(model, trajectories, OBJECTIVE)
        steps[dtype] = result, flat(on_cpu(gradients(model.module)))
    (truth, expected), (alone, own) = steps[torch.float64], steps[torch.float32]
    eps = torch.finfo(torch.float32).eps
    noise = (own - expected).norm() + eps * expected.norm()
    assert (flat(summed) - expected).norm() <= 2 * noise
    logprob_noise = np.abs(alone.logprobs_P - truth.logprobs_P).max() + eps * np.abs(truth.logprobs_P).max()
    assert np.abs(joined(trajectories, found) - truth.logprobs_P).max() <= 4 * logprob_noise
    # Shares of the loss add up to 1 and advantages are about 1, so the loss is off by no more than log-probs are.
    assert abs(sum(part["loss"] for part in found) - truth.loss) <= 4 * logprob_noise


def joined(trajectories: Sequence[Trajectory], found: list[dict]) -> np.ndarray:
    """[P]. Log-probs of all ranks, in the order of the step."""
    logprobs = {}
    for numbers, part in zip(dealt(trajectories, len(found)), found, strict=True):
        ends = np.cumsum([trajectories[i].loss_mask.sum() for i in numbers])
        logprobs |= zip(numbers, np.split(part["logprobs"], ends[:-1]) if numbers else (), strict=True)
    return np.concatenate([logprobs[i] for i in range(len(trajectories))])


def flat(by_name: dict[str, Tensor]) -> Tensor:
    """One vector in float64."""
    return torch.cat([gradient.double().flatten() for gradient in by_name.values()])


def on_cpu(by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies for a file, or to compare with one."""
    return {name: gradient.cpu() for name, gradient in by_name.items()}


def check_exchange(exchange: Exchange) -> None:
    """What threads do, processes do too: sizes that differ, and nothing at all."""
    rank, ranks = exchange.rank, exchange.ranks
    assert [a.tolist() for a in exchange.all_gather(np.full(rank, rank), range(ranks))] == [
        [r] * r for r in range(ranks)
    ]
    assert [a.size for a in exchange.all_gather(np.zeros(0), [0] * ranks)] == [0] * ranks
    parts = [np.full(rank * other, rank, dtype=np.uint8) for other in range(ranks)]
    swapped = exchange.all_to_all(parts, [rank * other for other in range(ranks)])
    assert [(a.dtype, a.tolist()) for a in swapped] == [(np.uint8, [r] * (rank * r)) for r in range(ranks)]
    assert [a.size for a in exchange.all_to_all([np.zeros(0, np.int32)] * ranks, [0] * ranks)] == [0] * ranks
    assert exchange.maximum(np.array([rank, -rank])).tolist() == [ranks - 1, 0]


def run_process(rank: int, ranks: int, folder: str, device: str) -> None:
    """What each process does; device is "cpu" for gloo, "cuda" for NCCL with a GPU for each process."""
    torch.set_num_threads(1)
    own_gpu = torch.device("cuda", rank) if device == "cuda" else None
    if own_gpu is not None:
        torch.cuda.set_device(own_gpu)
    dist.init_process_group(
        "gloo" if own_gpu is None else "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=own_gpu,
    )
    exchange = ProcessGroupExchange(device=device)
    check_exchange(exchange)
    check_sums(rank, device)
    for dtype in (torch.float64, torch.float32):
        model = prepared(MODEL_TYPE, dtype=dtype, device=device)
        found = run(exchange, model, CASE, "tree")
        sum_gradients(model.module.parameters())
        torch.save((found, on_cpu(gradients(model.module))), f"{folder}/{rank}.{dtype}")
    dist.destroy_process_group()


def check_sums(rank: int, device: str) -> None:
    """A gradient that no rank has stays away; one that a single rank has is everywhere."""
    unused, on_one_rank = (torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    if rank == 1:
        on_one_rank.grad = torch.full_like(on_one_rank, 3.0)
    sum_gradients([unused, on_one_rank])
    assert unused.grad is None
    assert on_one_rank.grad is not None and on_one_rank.grad.tolist() == [3.0, 3.0]


def check_processes(ranks: int, folder: Path, device: str) -> None:
    """Compare what `run_process` left in a folder with one process on the same device."""
    for dtype in (torch.float64, torch.float32):
        saved = [torch.load(folder / f"{rank}.{dtype}", weights_only=False) for rank in range(ranks)]
        every = [found for found, _ in saved]
        assert sum(found["microbatches"] > 0 for found in every) > 1, "several ranks must have something to run"
        for _, summed in saved:
            if dtype == torch.float64:
                check(prepared(MODEL_TYPE, device=device), CASE, "tree", every, summed)
            else:
                check_float32(device, every, summed)
