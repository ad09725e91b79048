"""A step whose trajectories live on several ranks is the step of one process: loss, gradients and log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import set_forkserver_preload
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

import harts
from harts.data import Trajectory
from harts.data.exchange import Exchange, run_in_threads
from harts.models.tiny import tiny_model
from harts.testing import assert_gradients_close, float64_throughout, gradients
from harts.train.distributed import ProcessGroupExchange, sum_gradients
from harts.train.ranks import compute_logprobs_across_ranks, train_step_across_ranks
from tests.cases import CASES, trajectories_of
from tests.routing import tiny_moe

NAMED = {case.name: case for case in CASES}
OBJECTIVE = harts.gspo(clip_low=0.2, clip_high=0.2, kl_coef=0.1, normalization="group")
"""Sequence-level ratios and normalisers by group: both need more than the tokens of one rank."""


def dealt(trajectories: Sequence[Trajectory], ranks: int) -> list[list[int]]:
    """Numbers of each rank's trajectories; the last of several ranks has none."""
    rank_N = np.random.default_rng(ranks).integers(0, max(1, ranks - 1), len(trajectories))
    return [np.flatnonzero(rank_N == rank).tolist() for rank in range(ranks)]


def prepared(model_type: str) -> harts.TreeModel:
    return harts.prepare(tiny_model(model_type, dtype=torch.float64))


def run(exchange: Exchange, model: harts.TreeModel, name: str, execution: harts.Execution) -> dict:
    """This rank's part of the step."""
    trajectories = trajectories_of(NAMED[name])
    numbers = dealt(trajectories, exchange.ranks)[exchange.rank]
    longest = max(len(t) for t in trajectories)
    with float64_throughout():
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
    np.testing.assert_array_equal(logprobs, result.logprobs_P)
    return {"loss": result.loss, "logprobs": result.logprobs_P, "microbatches": result.num_microbatches}


def without_streams(trajectory: Trajectory) -> Trajectory:
    """What log-probs alone need: ranks may even differ in what else they carry."""
    return replace(trajectory, sampling_logprobs=None, ref_logprobs=None)


def check(
    model: harts.TreeModel, name: str, execution: harts.Execution, found: list[dict], summed: dict[str, Tensor]
) -> None:
    """Compare what all ranks found with one process."""
    trajectories = trajectories_of(NAMED[name])
    with float64_throughout():
        whole = harts.train_step(model, trajectories, OBJECTIVE, execution=execution)
    assert sum(part["loss"] for part in found) == pytest.approx(whole.loss, rel=1e-10, abs=1e-14)
    assert_gradients_close(gradients(model.module), summed, ratio=1e-10)
    ends = np.cumsum([t.loss_mask.sum() for t in trajectories])
    pieces = np.split(whole.logprobs_P, ends[:-1])
    for numbers, part in zip(dealt(trajectories, len(found)), found, strict=True):
        expected = np.concatenate([np.zeros(0), *(pieces[i] for i in numbers)])
        np.testing.assert_allclose(part["logprobs"], expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("name", "model_type", "execution", "ranks"),
    [
        ("worked_example", "qwen3_5_text", "tree", 1),
        ("worked_example", "qwen3_5_text", "tree", 5),
        ("depth_beyond_two", "qwen3_5_text", "tree", 3),
        ("one_sample_a_call", "qwen3_next", "tree", 2),
        ("ends_inside_and_duplicates", "qwen3", "tree", 4),
        ("forest", "qwen3", "flat", 3),
    ],
)
def test_ranks_add_up_to_the_step_of_one_process(name, model_type, execution, ranks):
    models = [prepared(model_type) for _ in range(ranks)]  # not in the threads, which share the random generator
    found = run_in_threads(ranks, lambda exchange: run(exchange, models[exchange.rank], name, execution))
    every = [gradients(model.module) for model in models]
    summed = {key: torch.stack([g[key] for g in every]).sum(0) for key in every[0]}
    check(prepared(model_type), name, execution, found, summed)
    if name == "worked_example":
        busy = sum(part["microbatches"] > 0 for part in found)
        assert busy == min(ranks, 3), "three trajectories are not inside another, so other ranks have nothing to run"


@pytest.mark.parametrize("balance", ["sequence", "step"])
def test_routers_are_those_of_the_whole_step(balance):
    """Four ranks, the last of which holds and runs nothing; a trajectory counts as often as its weight says."""
    losses = harts.RouterLosses(balance=balance, balance_coef=0.3, z_coef=0.05, count_weights=True)
    models = [harts.prepare(tiny_moe("deepseek_v3"), router=losses) for _ in range(5)]
    trajectories = trajectories_of(NAMED["branch_in_first_chunk"])[:3]
    numbers = [[0, 2], [1], [], []]

    def work(exchange: Exchange) -> harts.RouterStatistics:
        own = [trajectories[i] for i in numbers[exchange.rank]]
        with float64_throughout():
            model = models[exchange.rank]
            found = train_step_across_ranks(model, own, OBJECTIVE, exchange, numbers=numbers[exchange.rank])
        assert found.router is not None
        return found.router

    parts = run_in_threads(4, work)
    with float64_throughout():
        whole = harts.train_step(models[4], trajectories, OBJECTIVE)
    assert whole.router is not None
    total = sum(parts[1:], start=parts[0])
    np.testing.assert_allclose(total.load_MX, whole.router.load_MX, rtol=1e-12)
    assert total.balance_loss == pytest.approx(whole.router.balance_loss, rel=1e-10)
    assert total.z_loss == pytest.approx(whole.router.z_loss, rel=1e-10)
    every = [gradients(model.module) for model in models[:4]]
    summed = {key: torch.stack([g[key] for g in every]).sum(0) for key in every[0]}
    assert_gradients_close(gradients(models[4].module), summed, ratio=1e-10)


MODEL_TYPE, CASE = "qwen3_5_text", "depth_beyond_two"


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


def run_process(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    model = prepared(MODEL_TYPE)
    found = run(ProcessGroupExchange(), model, CASE, "tree")
    check_exchange(ProcessGroupExchange())
    unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    on_one_rank = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    if rank == 1:
        on_one_rank.grad = torch.full_like(on_one_rank, 3.0)
    sum_gradients([unused, *model.module.parameters(), on_one_rank])
    assert unused.grad is None
    assert on_one_rank.grad is not None and on_one_rank.grad.tolist() == [3.0, 3.0]
    torch.save((found, gradients(model.module)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_train_the_step_of_one(tmp_path: Path, ranks: int):
    set_forkserver_preload([__name__])  # one process imports, the others are copies of it
    start_processes(run_process, args=(ranks, str(tmp_path)), nprocs=ranks, start_method="forkserver")
    saved = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    for _, summed in saved:
        check(prepared(MODEL_TYPE), CASE, "tree", [found for found, _ in saved], summed)


def test_what_cannot_run_across_ranks_is_refused():
    plain = harts.prepare(tiny_model("qwen3"))
    one = [Trajectory.of([1, 2, 3])]
    with pytest.raises(ValueError, match="execution is 'fast'"):
        run_in_threads(1, lambda ranks: train_step_across_ranks(plain, one, OBJECTIVE, ranks, execution="fast"))  # type: ignore[arg-type]
    untrained = [Trajectory.of([1, 2], loss_mask=[0, 0], sampling_logprobs=[0, 0], ref_logprobs=[0, 0])]
    with pytest.raises(ValueError, match="without a trained token"):
        run_in_threads(2, lambda ranks: train_step_across_ranks(plain, untrained, OBJECTIVE, ranks))


def test_all_ranks_raise_what_one_finds_wrong():
    """The one that holds the trajectory says what; none is left waiting."""
    plain = harts.prepare(tiny_model("qwen3"))
    held = [[Trajectory.of([1, 2, 3])], [], [Trajectory.of([1, 2, 9999])]]

    def work(exchange: Exchange) -> str:
        with pytest.raises(ValueError) as caught:
            train_step_across_ranks(plain, held[exchange.rank], harts.Supervised(), exchange)
        return str(caught.value)

    messages = run_in_threads(3, work)
    assert "9999" in messages[2]
    assert all("Ranks [2] found their trajectories wrong" in message for message in messages[:2])
