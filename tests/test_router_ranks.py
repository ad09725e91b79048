"""Routers over two gloo ranks: loads and gradients that are all-reduced are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import harts
from harts.data import TrajectoryBatch
from harts.layers.moe.losses import Balance
from harts.plan import CostModel, Plan, make_plan
from harts.testing import assert_gradients_close, float64_throughout, gradients
from harts.tree import build_prefix_tree
from tests.cases import CASES, trajectories_of
from tests.processes import run_in_processes
from tests.routing import tiny_moe

OBJECTIVE = harts.grpo(kl_coef=0.1)
TRAJECTORIES = trajectories_of(next(case for case in CASES if case.name == "branch_in_first_chunk"))
LOSSES: dict[Balance, harts.RouterLosses] = {
    balance: harts.RouterLosses(balance=balance, balance_coef=0.3, z_coef=0.05) for balance in ("sequence", "step")
}


def two_rank_plan() -> Plan:
    cost = CostModel(flops_per_token=1.0, flops_per_pair=0.01)
    tree = build_prefix_tree(TrajectoryBatch.of(TRAJECTORIES))
    return make_plan(tree, max_tokens_per_microbatch=100, cost=cost, ranks=2)


def summed(statistics: harts.RouterStatistics) -> harts.RouterStatistics:
    load_MX, tokens = (
        torch.from_numpy(statistics.load_MX.copy()),
        torch.tensor(statistics.num_tokens, dtype=torch.float64),
    )
    losses = torch.tensor([statistics.balance_loss, statistics.z_loss], dtype=torch.float64)
    for tensor in (load_MX, tokens, losses):
        dist.all_reduce(tensor)
    balance, z = losses.tolist()
    return replace(statistics, load_MX=load_MX.numpy(), num_tokens=tokens.item(), balance_loss=balance, z_loss=z)


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    plan, found = two_rank_plan(), {}
    for balance, losses in LOSSES.items():
        model = harts.prepare(tiny_moe("deepseek_v3"), router=losses)
        with float64_throughout():
            if balance == "step":
                load = summed(harts.count_load(model, TRAJECTORIES, plan=plan, dp_rank=rank))
                model = replace(model, router=replace(losses, load=load))
            result = harts.train_step(model, TRAJECTORIES, OBJECTIVE, plan=plan, dp_rank=rank)
        assert result.router is not None
        total = summed(result.router)
        harts.update_expert_bias(model, total, rate=0.01)
        reduced = gradients(model.module)
        for gradient in reduced.values():
            dist.all_reduce(gradient)
        biases = {name: b.clone() for name, b in model.module.named_buffers() if name.endswith("correction_bias")}
        found[balance] = (reduced, total.load_MX, (total.balance_loss, total.z_loss), biases)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_give_the_step_of_one(tmp_path: Path):
    assert all(any(m.trajectories for m in rank) for rank in two_rank_plan().slots)
    run_in_processes(run_rank, str(tmp_path), count=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    for balance, losses in LOSSES.items():
        model = harts.prepare(tiny_moe("deepseek_v3"), router=losses)
        with float64_throughout():
            result = harts.train_step(model, TRAJECTORIES, OBJECTIVE)
        assert result.router is not None
        harts.update_expert_bias(model, result.router, rate=0.01)
        for reduced, load_MX, (balance_loss, z_loss), biases in (rank[balance] for rank in ranks):
            np.testing.assert_array_equal(load_MX, result.router.load_MX)
            assert balance_loss == pytest.approx(result.router.balance_loss, rel=1e-10)
            assert z_loss == pytest.approx(result.router.z_loss, rel=1e-10)
            assert_gradients_close(gradients(model.module), reduced, ratio=1e-10)
            named = dict(model.module.named_buffers())
            assert biases and all(torch.equal(b, named[name]) for name, b in biases.items())
