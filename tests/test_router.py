"""Routers on trees do what they do when each trajectory is trained alone: loads, losses, gradients, biases."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

import harts
from harts.data import Trajectory, TrajectoryBatch
from harts.layers.moe import reference
from harts.layers.moe.losses import FORMS, StepShare
from harts.layers.moe.recorder import RouterRecorder
from harts.layout.packed import PackedLayout, pack
from harts.logprobs import linear_logprobs
from harts.models.registry import family_of_type
from harts.plan import CostModel, Plan, make_plan
from harts.testing import assert_gradients_close, float64_throughout, forward_one_trajectory_at_a_time, gradients
from harts.tree import build_prefix_tree
from tests.cases import BESIDE, CASES, RICH, Case, trajectories_of
from tests.routing import MOE_TYPES, reference_losses, route_alone, routers_kept, tiny_moe
from tests.test_plans import random_plan

EXACT = 1e-10
ANCHORS = ["qwen3_next", "deepseek_v3"]
"""A softmax router and one of sigmoids, groups and a bias."""
ALL_FORMS = ("qwen3_next", "deepseek_v3", "gpt_oss")
"""What runs with every form of the loss by default; others with one, and the rest is slow together."""
BIASED = [name for name in MOE_TYPES if any(r.bias is not None for r in family_of_type(name)[1].routers.values())]
SMALL = next(case for case in CASES if case.name == "branch_in_first_chunk")
NAMED = {case.name: case for case in CASES}
OBJECTIVE = harts.grpo(kl_coef=0.1)
COST = CostModel(flops_per_token=1.0, flops_per_pair=0.01)


def losses_of(balance: str | None, **settings: Any) -> harts.RouterLosses:
    coefficients = {"balance_coef": 0.0 if balance is None else 0.3, "z_coef": 0.05}
    return harts.RouterLosses(balance=balance, **{**coefficients, **settings})  # type: ignore[arg-type]


def plan_of(trajectories: Sequence[Trajectory], *, ranks: int, slots: int, execution: str = "tree") -> Plan:
    tree = build_prefix_tree(TrajectoryBatch.of(trajectories))
    total = 10 * tree.num_trajectory_tokens
    whole = make_plan(tree, max_tokens_per_microbatch=total, cost=COST, sharing=execution == "tree")
    return random_plan(whole, ranks=ranks, slots=slots, seed=3) if ranks * slots > 1 else whole


def laid_out(model: harts.TreeModel, trajectories: Sequence[Trajectory]) -> tuple[PackedLayout, RouterRecorder]:
    """One microbatch that is the whole step."""
    batch = TrajectoryBatch.of(trajectories)
    layout = pack(build_prefix_tree(batch), batch, model.needs)
    recorder = model.routing.recorder(layout, batch, model.router)
    assert recorder is not None
    return layout, recorder


def assert_step_equals_reference(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    losses: harts.RouterLosses,
    *,
    plan: Plan,
    handed_in: bool = False,
    checkpointing: dict[str, bool] | None = None,
) -> harts.RouterStatistics:
    """Objective and router losses together, every rank of the plan after the other."""
    execution = "tree" if plan.sharing else "flat"
    microbatches = [list(m.trajectories) for rank in plan.slots for m in rank if m.trajectories]
    with float64_throughout():
        with routers_kept(model) as alone:
            _, loss = forward_one_trajectory_at_a_time(model, trajectories, OBJECTIVE)
        counts = [t.weight if losses.count_weights else 1.0 for t in trajectories]
        balance, z = reference_losses(model, alone, losses, counts=counts, microbatches=microbatches)
    (loss + losses.balance_coef * balance + losses.z_coef * z).backward()
    expected = gradients(model)
    model.zero_grad()
    with float64_throughout():
        prepared = harts.prepare(model, router=losses)
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        ranks = range(plan.ranks)
        if handed_in:
            counted = [
                harts.count_load(prepared, trajectories, execution=execution, plan=plan, dp_rank=r) for r in ranks
            ]
            prepared = replace(prepared, router=replace(losses, load=sum(counted[1:], start=counted[0])))
        results = [
            harts.train_step(prepared, trajectories, OBJECTIVE, execution=execution, plan=plan, dp_rank=r)
            for r in ranks
        ]
        actual = gradients(model)
        prepared.restore()
    statistics = [result.router for result in results if result.router is not None]
    total = sum(statistics[1:], start=statistics[0])
    assert total.balance_loss == pytest.approx(balance.item(), rel=EXACT)
    assert total.z_loss == pytest.approx(z.item(), rel=EXACT)
    np.testing.assert_allclose(total.load_MX, reference.loads(alone, counts), rtol=EXACT)
    assert_gradients_close(expected, actual, ratio=EXACT)
    return total


@pytest.mark.parametrize(
    ("balance", "model_type"),
    [
        pytest.param(balance, name, marks=[] if balance == "sequence" or name in ALL_FORMS else [pytest.mark.slow])
        for balance in FORMS
        for name in MOE_TYPES
    ],
)
def test_losses_loads_and_gradients_equal_training_each_trajectory_alone(balance: str, model_type: str):
    trajectories = trajectories_of(SMALL)
    plan = plan_of(trajectories, ranks=1, slots=1)
    total = assert_step_equals_reference(tiny_moe(model_type), trajectories, losses_of(balance), plan=plan)
    assert total.num_tokens == sum(len(t) for t in trajectories)
    assert (total.max_violation_M > 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_tree(case: Case):
    trajectories = trajectories_of(case)
    losses = losses_of("sequence", count_weights=True)
    plan = plan_of(trajectories, ranks=1, slots=1)
    assert_step_equals_reference(tiny_moe("deepseek_v3"), trajectories, losses, plan=plan)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[] if name in ANCHORS else [pytest.mark.slow]) for name in MOE_TYPES]
)
@pytest.mark.parametrize("balance", FORMS)
def test_several_microbatches_and_ranks(balance: str, model_type: str):
    trajectories = trajectories_of(SMALL)
    plan = plan_of(trajectories, ranks=2, slots=2)
    handed_in = balance == "step"
    losses = losses_of(balance, count_weights=True)
    assert_step_equals_reference(tiny_moe(model_type), trajectories, losses, plan=plan, handed_in=handed_in)


@pytest.mark.parametrize("model_type", ANCHORS)
@pytest.mark.parametrize("balance", FORMS)
def test_flat_execution_is_the_reference_too(balance: str, model_type: str):
    trajectories = trajectories_of(SMALL)
    plan = plan_of(trajectories, ranks=1, slots=3, execution="flat")
    assert_step_equals_reference(tiny_moe(model_type), trajectories, losses_of(balance), plan=plan)


@pytest.mark.parametrize("model_type", MOE_TYPES)
@pytest.mark.parametrize(
    "use_reentrant",
    [pytest.param(True, marks=pytest.mark.slow, id="reentrant"), pytest.param(False, id="non_reentrant")],
)
def test_activation_checkpointing_counts_nothing_twice(use_reentrant: bool, model_type: str):
    trajectories = trajectories_of(SMALL)
    plan = plan_of(trajectories, ranks=1, slots=2)
    assert_step_equals_reference(
        tiny_moe(model_type),
        trajectories,
        losses_of("microbatch"),
        plan=plan,
        checkpointing={"use_reentrant": use_reentrant},
    )


@pytest.mark.parametrize("padded", [False, True], ids=["alone", "padded"])
def test_the_microbatch_form_is_the_loss_of_transformers(padded: bool):
    trajectories = trajectories_of(SMALL)
    model = tiny_moe("qwen3_next")
    config = model.config
    with float64_throughout():
        alone = route_alone(model, trajectories)
        longest = max(len(t) for t in trajectories)
        mask_NL = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in trajectories])
        logits = []
        for layer in range(len(alone[0])):
            rows = [torch.nn.functional.pad(t[layer][0], (0, 0, 0, longest - len(t[layer][0]))) for t in alone]
            logits.append(torch.cat(rows).detach())
        expected = load_balancing_loss_func(tuple(logits), config.num_experts, config.num_experts_per_tok, mask_NL)
        prepared = harts.prepare(model, router=losses_of("microbatch"))
        execution = "flat" if padded else "tree"
        plan = plan_of(trajectories, ranks=1, slots=1, execution=execution)
        result = harts.train_step(prepared, trajectories, OBJECTIVE, execution=execution, plan=plan)
    assert isinstance(expected, torch.Tensor)
    assert result.router is not None
    assert result.router.balance_loss == pytest.approx(expected.item(), rel=EXACT)


def test_counting_shared_tokens_once_is_another_loss_and_another_bias():
    rng = np.random.default_rng(0)
    trunk = np.full(20, 5)  # its experts are busy, and busier if each trajectory counts
    trajectories = [Trajectory.of(np.concatenate([trunk, [10 + i], rng.integers(0, 97, 8)])) for i in range(8)]
    model = harts.prepare(tiny_moe("deepseek_v3"), router=losses_of("microbatch"))
    layout, right = laid_out(model, trajectories)
    share = StepShare.of(layout.paths, count_weights=False, num_step_tokens=92, num_step_trajectories=8)
    share = replace(share, count_T=torch.ones_like(share.count_T), num_tokens=92)
    once = RouterRecorder(model.routing.layers, losses_of("microbatch"), share=share)
    biases, losses, start = [], [], copy.deepcopy(model.module.state_dict())
    for recorder in (right, once):
        model.module.load_state_dict(start)
        model.hidden_states(layout, recorder)
        statistics = recorder.statistics()
        harts.update_expert_bias(model, statistics, rate=0.01)
        losses.append(statistics.balance_loss)
        named = model.module.named_buffers()
        biases.append(torch.stack([b.clone() for name, b in named if name.endswith("e_score_correction_bias")]))
    assert layout.num_tokens == 92
    assert abs(losses[0] - losses[1]) > 0.03 * losses[0]
    assert (biases[0] != biases[1]).sum() >= 2


@pytest.mark.parametrize("model_type", BIASED)
@pytest.mark.parametrize("form", ["sign", "proportional"])
def test_biases_move_as_after_training_each_trajectory_alone(form: Any, model_type: str):
    trajectories = trajectories_of(BESIDE)
    with float64_throughout():
        load_MX = reference.loads(route_alone(tiny_moe(model_type), trajectories), [1.0] * len(trajectories))
        model = harts.prepare(tiny_moe(model_type), router=harts.RouterLosses())
        result = harts.train_step(model, trajectories, OBJECTIVE)
    assert result.router is not None
    pairs = [(site.kind.bias, site.block) for site in model.routing.sites]
    before = [of(block).clone() for of, block in pairs if of is not None]
    harts.update_expert_bias(model, result.router, rate=0.01, form=form)
    for (of, block), old, load_X in zip(pairs, before, load_MX, strict=True):
        assert of is not None
        error_X = load_X.mean() - load_X
        step_X = error_X.sign() if form == "sign" else error_X / load_X.mean()
        torch.testing.assert_close(of(block), old + 0.01 * step_X, rtol=EXACT, atol=0)


def test_two_microbatches_alive_and_backward_on_another_thread():
    """Nothing is found through a global: two forwards, then both backwards, recomputed on another thread."""
    module = tiny_moe("qwen3_next")
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = harts.prepare(module, router=losses_of("sequence"))
    trajectories = [trajectories_of(NAMED[name]) for name in ("branch_in_first_chunk", "worked_example")]

    def forward(part: Sequence[Trajectory]) -> torch.Tensor:
        layout, recorder = laid_out(model, part)
        return linear_logprobs(model.hidden_states(layout, recorder), model.head, layout.edges)[0].sum()

    for part in trajectories:
        forward(part).backward()
    expected = gradients(module)
    module.zero_grad()
    sums = [forward(part) for part in trajectories]
    thread = threading.Thread(target=lambda: [s.backward() for s in sums])
    thread.start()
    thread.join()
    for name, gradient in gradients(module).items():
        assert torch.equal(gradient, expected[name]), name


def test_a_microbatch_without_trained_tokens_is_balanced_too():
    ids = trajectories_of(RICH)[0].token_ids
    masked = Trajectory.of(ids, loss_mask=np.zeros(ids.size), sampling_logprobs=0.0, ref_logprobs=0.0)
    trajectories = [masked, *trajectories_of(NAMED["worked_example"])]
    whole = plan_of(trajectories, ranks=1, slots=1)
    (microbatch,) = whole.slots[0]
    first, rest = replace(microbatch, trajectories=(0,)), replace(microbatch, trajectories=(1, 2, 3, 4))
    plan = replace(whole, slots=((first, rest),))
    assert_step_equals_reference(tiny_moe("qwen3_next"), trajectories, losses_of("layer"), plan=plan)


@pytest.mark.parametrize("balance", FORMS)
def test_a_microbatch_of_weight_zero_adds_nothing(balance: str):
    trajectories = [replace(t, weight=float(i > 0)) for i, t in enumerate(trajectories_of(SMALL))]
    whole = plan_of(trajectories, ranks=1, slots=1)
    (microbatch,) = whole.slots[0]
    first, rest = replace(microbatch, trajectories=(0,)), replace(microbatch, trajectories=(1, 2, 3))
    steps = []
    with float64_throughout():
        for step, plan in ((trajectories, replace(whole, slots=((first, rest),))), (trajectories[1:], None)):
            model = harts.prepare(tiny_moe("qwen3_next"), router=losses_of(balance, count_weights=True))
            result = harts.train_step(model, step, harts.dapo(kl_coef=0.1), plan=plan)
            assert result.router is not None
            steps.append((result.router, gradients(model.module)))
    assert steps[0][0].balance_loss == pytest.approx(steps[1][0].balance_loss, rel=EXACT)
    np.testing.assert_array_equal(steps[0][0].load_MX, steps[1][0].load_MX)
    assert_gradients_close(steps[1][1], steps[0][1], ratio=EXACT)


@pytest.mark.parametrize("balance", FORMS)
def test_a_trajectory_of_weight_two_counts_as_two_copies(balance: str):
    trajectories = list(trajectories_of(SMALL))
    doubled = [replace(t, weight=t.weight / 2) for t in trajectories for _ in range(2)]
    model = harts.prepare(tiny_moe("deepseek_v3"), router=losses_of(balance, count_weights=True))
    steps = []
    for variant in (trajectories, doubled):
        model.module.zero_grad()
        with float64_throughout():
            result = harts.train_step(model, variant, harts.dapo(kl_coef=0.1))
        assert result.router is not None
        steps.append((result.router, gradients(model.module)))
    np.testing.assert_allclose(steps[0][0].load_MX, steps[1][0].load_MX, rtol=EXACT)
    assert steps[0][0].balance_loss == pytest.approx(steps[1][0].balance_loss, rel=EXACT)
    assert_gradients_close(steps[0][1], steps[1][1], ratio=EXACT)


def test_compiled_blocks_follow_the_recorder_of_each_pass():
    trajectories, results = trajectories_of(SMALL), []
    for is_compiled in (False, True):
        module = tiny_moe("qwen3_next", dtype=torch.float32)
        for layer in module.model.layers:
            layer.mlp = torch.compile(layer.mlp, backend="eager") if is_compiled else layer.mlp
        model = harts.prepare(module, router=losses_of("sequence"))
        plan = plan_of(trajectories, ranks=1, slots=2)
        result = harts.train_step(model, trajectories, OBJECTIVE, plan=plan)
        assert result.router is not None
        results.append((result.router, [p.grad for p in module.parameters()]))
    np.testing.assert_array_equal(results[0][0].load_MX, results[1][0].load_MX)
    for expected, actual in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(actual, expected)


def test_statistics_without_losses_leave_the_step_bit_for_bit():
    trajectories, runs = trajectories_of(RICH), []
    for router in (None, harts.RouterLosses()):
        model = harts.prepare(tiny_moe("qwen3_next", dtype=torch.float32), router=router)
        result = harts.train_step(model, trajectories, OBJECTIVE)
        runs.append((result, gradients(model.module)))
    assert runs[0][0].router is None
    assert np.array_equal(runs[0][0].logprobs_P, runs[1][0].logprobs_P)
    assert all(torch.equal(g, runs[1][1][name]) for name, g in runs[0][1].items())


def test_what_cannot_be_honoured_is_refused_by_name():
    with pytest.raises(ValueError, match="balance is 'global', expected one of microbatch, layer, sequence, step"):
        harts.RouterLosses(balance="global")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="z_coef is -1"):
        harts.RouterLosses(z_coef=-1)
    with pytest.raises(ValueError, match=r"balance_coef is 0\.1 without a balance"):
        harts.RouterLosses(balance_coef=0.1)
    with pytest.raises(ValueError, match="A Qwen3ForCausalLM has no routers"):
        harts.prepare(tiny_moe("qwen3"), router=harts.RouterLosses())
    trajectories = trajectories_of(NAMED["worked_example"])
    model = harts.prepare(tiny_moe("qwen3_next"), router=losses_of("step"))
    with pytest.raises(ValueError, match="needs the loads of all 2 ranks"):
        harts.train_step(model, trajectories, OBJECTIVE, plan=plan_of(trajectories, ranks=2, slots=1))
    statistics = harts.count_load(model, trajectories)
    with pytest.raises(ValueError, match=r"routers .* have no correction bias"):
        harts.update_expert_bias(model, statistics)
    other = harts.prepare(tiny_moe("deepseek_v3"), router=harts.RouterLosses())
    with pytest.raises(ValueError, match="Got statistics of no tokens"):
        harts.update_expert_bias(other, other.routing.total([]))
    with pytest.raises(ValueError, match="form is 'cube'"):
        harts.update_expert_bias(other, harts.count_load(other, trajectories), form="cube")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Got statistics of 3 routers, expected those of the model's 2"):
        harts.update_expert_bias(other, statistics)
    with pytest.raises(ValueError, match="expected those of one model"):
        _ = statistics + harts.count_load(other, trajectories)
    with pytest.raises(ValueError, match="prepared without router"):
        harts.count_load(harts.prepare(tiny_moe("qwen3_next")), trajectories)
    model.module.model.layers[0].mlp.forward = lambda hidden_states: hidden_states
    with pytest.raises(ValueError, match=r"The routers model\.layers\.0\.mlp\.gate were not called"):
        harts.train_step(model, trajectories, OBJECTIVE)


@pytest.mark.parametrize(
    ("model_type", "setting"), [("minimax", "router_jitter_noise"), ("qwen3_next", "capacity_factor")]
)
def test_routing_by_chance_or_capacity_is_refused_by_name(model_type: str, setting: str):
    module = tiny_moe(model_type, overrides={setting: 1.25})
    with pytest.raises(ValueError, match=rf"{model_type} has {setting} = 1\.25: .* drops no token\. Set config"):
        harts.prepare(module)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_two_steps_are_bit_equal_with_every_experts_implementation(implementation: str):
    module = tiny_moe("qwen3_next", dtype=torch.float32)
    module.set_experts_implementation(implementation)
    model = harts.prepare(module, router=losses_of("sequence"))
    trajectories, runs = trajectories_of(SMALL), []
    for _ in range(2):
        module.zero_grad()
        result = harts.train_step(model, trajectories, OBJECTIVE)
        runs.append((result, gradients(module)))
    flat = harts.train_step(model, trajectories, OBJECTIVE, execution="flat")
    assert np.array_equal(runs[0][0].logprobs_P, runs[1][0].logprobs_P)
    assert all(torch.equal(g, runs[1][1][name]) for name, g in runs[0][1].items())
    np.testing.assert_allclose(flat.logprobs_P, runs[0][0].logprobs_P, rtol=1e-4, atol=1e-5)
