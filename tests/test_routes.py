"""Recorded routes drive the forward pass; tokens that agree but were routed otherwise are other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import harts
from harts.data import Trajectory, TrajectoryBatch
from harts.layers.moe.scores import chosen_softmax, sigmoid_weights, softmax_weights
from harts.models.registry import family_of_type
from harts.testing import assert_close, assert_gradients_close, float64_throughout, gradients
from harts.tree import build_prefix_tree
from tests.cases import CASES, trajectories_of
from tests.routing import MOE_TYPES, tiny_moe

EXACT = 1e-10
OBJECTIVE = harts.grpo(kl_coef=0.1)
EXECUTIONS: tuple[harts.Execution, ...] = ("flat", "tree")
SMALL = next(case for case in CASES if case.name == "branch_in_first_chunk")


def with_routes(trajectories: Sequence[Trajectory], routes: Sequence[NDArray[np.int32]]) -> list[Trajectory]:
    return [replace(t, routes=r) for t, r in zip(trajectories, routes, strict=True)]


def random_routes(model: harts.TreeModel, length: int, seed: int) -> NDArray[np.int32]:
    site = model.routing.sites[0]
    order = np.random.default_rng(seed).random((length, len(model.routing.sites), site.num_experts)).argsort(-1)
    return order[..., : site.num_active].astype(np.int32)


@pytest.mark.parametrize("model_type", MOE_TYPES)
def test_replaying_a_models_own_routes_changes_no_bit(model_type: str):
    trajectories, runs = trajectories_of(SMALL), []
    model = harts.prepare(tiny_moe(model_type, dtype=torch.float32))
    recorded = harts.record_routes(model, trajectories)
    for given in (trajectories, with_routes(trajectories, recorded)):
        model.module.zero_grad()
        result = harts.train_step(model, given, OBJECTIVE)
        runs.append((result.logprobs_P, gradients(model.module)))
    assert np.array_equal(runs[0][0], runs[1][0])
    assert_gradients_close(runs[0][1], runs[1][1], ratio=1e-5)
    assert harts.route_conflicts(with_routes(trajectories, recorded)).cost == 1


@pytest.mark.parametrize("model_type", MOE_TYPES)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_replay_on_a_tree_is_replay_of_each_trajectory_alone(checkpointing: bool, model_type: str):
    module = tiny_moe(model_type)
    if checkpointing:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = harts.prepare(module, router=harts.RouterLosses(balance="sequence", balance_coef=0.2, z_coef=0.1))
    trajectories = trajectories_of(SMALL)
    longest = random_routes(model, 200, 0)
    given = with_routes(trajectories, [longest[: len(t)].copy() for t in trajectories])
    given[1].routes[5:] = random_routes(model, len(given[1]) - 5, 1)  # type: ignore[index]
    given[2].routes[3:7] = -1  # type: ignore[index]
    results, found = [], []
    with float64_throughout():
        for execution in EXECUTIONS:
            module.zero_grad()
            budget = 100 if execution == "flat" else 16384
            results.append(
                harts.train_step(model, given, OBJECTIVE, execution=execution, max_tokens_per_microbatch=budget)
            )
            found.append(gradients(module))
        own = harts.compute_logprobs(model, trajectories)
    flat, tree = results
    assert flat.num_microbatches > 1 and tree.num_tokens_distinct < tree.num_tokens_flat
    assert_close("log-probs", torch.from_numpy(flat.logprobs_P), torch.from_numpy(tree.logprobs_P), ratio=EXACT)
    assert_gradients_close(found[0], found[1], ratio=EXACT)
    assert flat.router is not None and tree.router is not None
    np.testing.assert_array_equal(flat.router.load_MX, tree.router.load_MX)
    assert tree.router.balance_loss == pytest.approx(flat.router.balance_loss, rel=EXACT)
    assert np.abs(own - tree.logprobs_P).max() > 1e-3, "routes matter"


def test_equal_tokens_with_two_sets_of_routes_have_the_two_branches_they_must_have():
    model = harts.prepare(tiny_moe("qwen3_5_moe_text"))
    ids = [7, 8, 9, 10, 11]
    one = random_routes(model, 5, 0)
    other = one.copy()
    other[2, 1] = (one[2, 1] + 1) % 6
    step = [
        Trajectory.of(ids, routes=routes, sampling_logprobs=-4.0, ref_logprobs=-4.0, advantages=a)
        for routes, a in ((one, 1.0), (other, -1.0), (one.copy(), 2.0))
    ]
    tree = build_prefix_tree(TrajectoryBatch.of(step))
    assert tree.parent_S.tolist() == [-1, 0, 0]
    assert sorted(zip(tree.start_S.tolist(), tree.multiplicity_S.tolist(), strict=True)) == [(0, 3), (2, 1), (2, 2)]
    assert harts.route_conflicts(step).num_tokens_distinct == 2 + 3 + 3
    with float64_throughout():
        replayed = [harts.compute_logprobs(model, step, execution=e) for e in EXECUTIONS]
    np.testing.assert_allclose(replayed[1], replayed[0], rtol=EXACT)
    first, second, third = replayed[1].reshape(3, 4)
    assert np.array_equal(first, third)
    assert first[0] == second[0] and first[1] == second[1], "the fork is at the third token, which predicts the next"
    assert (np.abs(first - second)[2:] > 1e-6).all()


def test_given_experts_have_the_weights_that_the_scores_give_them():
    logits_TX = torch.tensor([[0.0, np.log(2), np.log(5)]], dtype=torch.float64)
    experts_TA = torch.tensor([[0, 1]])
    thirds = pytest.approx([1 / 3, 2 / 3])
    assert chosen_softmax(logits_TX, experts_TA)[0].tolist() == thirds
    assert softmax_weights(logits_TX, experts_TA, renormalise=True)[0].tolist() == thirds
    assert softmax_weights(logits_TX, experts_TA, renormalise=False)[0].tolist() == pytest.approx([1 / 8, 2 / 8])
    plain = sigmoid_weights(logits_TX, experts_TA, renormalise=False, floor=0.0, scale=3.0)
    assert plain[0].tolist() == pytest.approx([3 / 2, 3 * 2 / 3])
    divided = sigmoid_weights(logits_TX, experts_TA, renormalise=True, floor=0.0, scale=1.0)
    assert divided[0].tolist() == pytest.approx([3 / 7, 4 / 7])


@pytest.mark.parametrize("model_type", ["qwen3_next", "granitemoehybrid", "deepseek_v3"])
def test_gradients_flow_through_the_gate_scores(model_type: str):
    model = harts.prepare(tiny_moe(model_type))
    step = [replace(t, routes=random_routes(model, len(t), 0)) for t in trajectories_of(SMALL)[:1]]
    harts.train_step(model, step, OBJECTIVE)
    routers = family_of_type(model_type)[1].routers
    found = [m.weight.grad for m in model.module.modules() if type(m).__name__ in routers]
    assert len(found) == len(model.routing.sites)
    assert all(isinstance(g, torch.Tensor) and g.abs().max() > 0 for g in found)


GOOD = np.array([[[0, 1]] * 3] * 3)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([GOOD[:2]], r"Trajectory 0 has 3 tokens but its routes have shape \(2, 3, 2\)"),
        ([GOOD, np.where(np.arange(18).reshape(3, 3, 2) == 9, 0, GOOD)], "Trajectory 1 has routes .0, 0. at token 1"),
        ([np.where(GOOD == 1, -1, GOOD)], r"Trajectory 0 has routes \[0, -1\] at token 0 and layer 0"),
        ([GOOD, None], "Trajectory 1 has no routes but others"),
        ([GOOD, GOOD[:, :2]], "Trajectory 1 has routes of 2 layers and 2 experts, but trajectory 0 of 3 and 2"),
        ([GOOD[:, :2]], "Got routes of 2 layers and 2 experts a token, expected 3 and 2"),
        ([GOOD + 5], "Got a route to expert 6, but the model has 6"),
    ],
)
def test_routes_that_do_not_fit_are_named(routes: list[NDArray[np.int32] | None], message: str):
    model = harts.prepare(tiny_moe("qwen3_next", dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        harts.compute_logprobs(model, [Trajectory.of([1, 2, 3], routes=r) for r in routes])


def test_models_without_routers_have_no_routes():
    model = harts.prepare(tiny_moe("qwen3", dtype=torch.float32))
    with pytest.raises(ValueError, match="has no routers whose choices"):
        harts.record_routes(model, trajectories_of(SMALL))
    with pytest.raises(ValueError, match="Got routes of 3 layers and 2 experts a token, expected 0 and 0"):
        harts.compute_logprobs(model, [Trajectory.of([1, 2, 3], routes=GOOD)])


@pytest.mark.parametrize("execution", ["tree", "flat"])
def test_recorded_routes_are_those_of_each_trajectory(execution: harts.Execution):
    trajectories = trajectories_of(SMALL)
    model = harts.prepare(tiny_moe("deepseek_v3"))
    together = harts.record_routes(model, trajectories, execution=execution)
    for trajectory, routes in zip(trajectories, together, strict=True):
        (alone,) = harts.record_routes(model, [trajectory], execution="flat")
        assert routes.shape == (len(trajectory), 2, 2)
        assert np.array_equal(np.sort(routes), np.sort(alone))
