"""A step whose trajectories live on several ranks is the step of one process: loss, gradients and log-probs."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import harts
from harts.data import Trajectory
from harts.data.exchange import Exchange, run_in_threads
from harts.models.tiny import tiny_model
from harts.testing import assert_gradients_close, float64_throughout, gradients
from harts.train import ranks as stages
from harts.train.ranks import train_step_across_ranks
from tests.cases import trajectories_of
from tests.processes import run_in_processes
from tests.routing import tiny_moe
from tests.train.rank_steps import NAMED, OBJECTIVE, check, check_processes, prepared, run, run_process


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


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_train_the_step_of_one(tmp_path: Path, ranks: int):
    """As `tests/gpu/test_ranks_nccl.py` does with NCCL."""
    run_in_processes(run_process, ranks, str(tmp_path), "cpu", count=ranks)
    check_processes(ranks, tmp_path, "cpu")


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


class Fails(torch.autograd.Function):
    """Passes its input on, and raises on the way back."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in the backward pass")


def fail_in(model: harts.TreeModel, where: str) -> None:
    """Let a model's passes raise."""

    def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if where == "the forward pass":
            raise torch.OutOfMemoryError("in the forward pass")
        return Fails.apply(output)  # type: ignore[return-value]

    model.module.get_input_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize("where", ["the plan", "the numbering", "sending", "the forward pass", "the backward pass"])
def test_no_rank_waits_for_one_that_fails(monkeypatch: pytest.MonkeyPatch, where: str):
    """Rank 1 raises its own error, the others what it told them; then all take the next step."""
    models = [prepared("qwen3") for _ in range(3)]
    spare = prepared("qwen3")
    failing = threading.local()
    patched = {"the plan": "make_plan", "the numbering": "run_where_held", "sending": "redistribute"}.get(where)
    if patched is None:
        fail_in(models[1], where)
    else:
        done = getattr(stages, patched)

        def fails(*args: object, **options: object) -> object:
            if failing.rank == 1:
                raise MemoryError(f"in {where}")
            return done(*args, **options)

        monkeypatch.setattr(stages, patched, fails)

    def work(exchange: Exchange) -> str:
        failing.rank = exchange.rank
        model = models[exchange.rank]
        with pytest.raises(RuntimeError if patched is None else (RuntimeError, MemoryError)) as caught:
            run(exchange, model, "worked_example", "tree")
        failing.rank = None
        found = run(exchange, spare if exchange.rank == 1 else model, "worked_example", "tree")
        assert found["microbatches"] > 0
        return f"{type(caught.value).__name__}: {caught.value}"

    said = run_in_threads(3, work)
    assert said[1].endswith(f"Error: in {where}")
    assert said[0] == said[2] == f"RankFailedError: Rank 1 failed: {said[1]}"
