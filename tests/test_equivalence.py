"""The theorem: a step on trees is the step on every trajectory alone, to float64 rounding.

The oracle runs transformers unmodified, one trajectory at a time, with full logits. float64 throughout, transformers'
inner float32 casts lifted in both executions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import harts
from harts.data import Trajectory
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.objective.streams import Objective
from harts.testing import assert_close, assert_gradients_close, float64_throughout, gradients
from tests.cases import ANCHORS, CASES, QUICK_CASES, RICH, VOCAB_SIZE, Case, decorate, trajectories_of
from tests.oracle import Step, step_of, step_of_tiny

MODEL_TYPES = supported_types()
EXACT = 1e-10
BRANCHES = next(case for case in CASES if case.name == "branches_in_one_chunk")
FULL = harts.grpo(kl_coef=0.1, entropy_coef=0.05)
"""Clipping, a KL penalty and an entropy bonus at once."""
OBJECTIVES = {
    "grpo": harts.grpo(),
    "grpo_by_group": harts.grpo(normalization="group"),
    "dapo": harts.dapo(),
    "gspo": harts.gspo(clip_low=0.2, clip_high=0.2),
    "cispo": harts.cispo(),
    "ppo": harts.ppo(kl_coef=0.1),
    "entropy": harts.ppo(entropy_coef=0.3),
    "supervised": harts.Supervised(),
}
CHECKPOINTING = {
    "reentrant": {"use_reentrant": True},
    "non_reentrant": {"use_reentrant": False},
}


def assert_step_equals_oracle(
    model: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    objective: Objective,
    *,
    expected: Step,
    execution: harts.Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
) -> harts.StepResult:
    with float64_throughout():
        prepared = harts.prepare(model)
        result = harts.train_step(
            prepared,
            trajectories,
            objective,
            execution=execution,
            max_tokens_per_microbatch=max_tokens_per_microbatch,
        )
        actual = gradients(model)
        prepared.restore()
    assert_close("log-probs", expected.logprobs_P, torch.from_numpy(result.logprobs_P), ratio=EXACT)
    assert abs(result.loss - expected.loss) <= EXACT * max(1.0, abs(expected.loss))
    assert_gradients_close(expected.gradients, actual, ratio=EXACT)
    return result


def assert_tiny_step_equals_oracle(
    model_type: str,
    case: Case,
    objective: Objective = FULL,
    *,
    execution: harts.Execution = "tree",
    max_tokens_per_microbatch: int = 16384,
    checkpointing: dict[str, bool] | None = None,
) -> harts.StepResult:
    model = tiny_model(model_type, dtype=torch.float64)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return assert_step_equals_oracle(
        model,
        trajectories_of(case),
        objective,
        expected=step_of_tiny(model_type, case, objective),
        execution=execution,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
    )


@pytest.mark.parametrize(
    ("case", "model_type"),
    [
        pytest.param(
            case,
            model_type,
            id=f"{case.name}-{model_type}",
            marks=[] if model_type in ANCHORS or case in QUICK_CASES else [pytest.mark.slow],
        )
        for model_type in MODEL_TYPES
        for case in CASES
    ],
)
def test_tree_step_equals_training_each_trajectory_alone(case: Case, model_type: str):
    result = assert_tiny_step_equals_oracle(model_type, case)
    assert result.num_tokens_distinct <= result.num_tokens_flat == sum(map(len, trajectories_of(case)))


@pytest.mark.parametrize(
    ("objective", "model_type"),
    [
        pytest.param(
            objective,
            model_type,
            id=f"{name}-{model_type}",
            marks=[] if model_type == "qwen3_5_text" or name in ("gspo", "supervised") else [pytest.mark.slow],
        )
        for name, objective in OBJECTIVES.items()
        for model_type in ANCHORS
    ],
)
def test_every_objective(objective: Objective, model_type: str):
    assert_tiny_step_equals_oracle(model_type, RICH, objective)


@pytest.mark.parametrize(
    ("mode", "model_type", "execution"),
    [(mode, name, execution) for name in ANCHORS for mode in CHECKPOINTING for execution in ("tree", "flat")]
    # Reentrant or not is the same code in every family.
    + [
        pytest.param(mode, name, "tree", marks=[pytest.mark.slow] if mode == "reentrant" else [])
        for name in MODEL_TYPES
        if name not in ANCHORS
        for mode in CHECKPOINTING
    ],
)
def test_activation_checkpointing(mode: str, execution: harts.Execution, model_type: str):
    case = RICH if model_type in ANCHORS else BRANCHES
    assert_tiny_step_equals_oracle(model_type, case, execution=execution, checkpointing=CHECKPOINTING[mode])


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in ANCHORS])
def test_flat_step_of_every_family_is_the_oracle_too(model_type: str):
    """Right-padded batches: transformers' own layers, whose padding must change nothing."""
    assert_tiny_step_equals_oracle(model_type, BRANCHES, execution="flat")


@pytest.mark.parametrize("model_type", ANCHORS)
@pytest.mark.parametrize("budget", [300, 16384], ids=["one_at_a_time", "padded_batch"])
def test_flat_step_is_the_oracle_too(budget: int, model_type: str):
    result = assert_tiny_step_equals_oracle(model_type, RICH, execution="flat", max_tokens_per_microbatch=budget)
    assert result.num_tokens_distinct == result.num_tokens_flat
    assert (result.num_microbatches > 5) == (budget == 300)


@pytest.mark.parametrize("budget", [300, 350, 400])
def test_microbatches_do_not_change_the_step(budget: int):
    result = assert_tiny_step_equals_oracle("qwen3_5_text", RICH, max_tokens_per_microbatch=budget)
    assert result.num_microbatches > 1


def test_an_all_masked_trajectory_counts_for_nothing():
    trajectories = list(trajectories_of(RICH))
    ids = trajectories[0].token_ids
    masked = Trajectory.of(ids, loss_mask=np.zeros(ids.size), sampling_logprobs=0.0, ref_logprobs=0.0)
    model = tiny_model("qwen3_5_text", dtype=torch.float64)
    both = [masked, *trajectories]
    with_masked = assert_step_equals_oracle(model, both, FULL, expected=step_of(model, both, FULL))
    without = assert_tiny_step_equals_oracle("qwen3_5_text", RICH)
    assert with_masked.loss == pytest.approx(without.loss, rel=EXACT)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from(ANCHORS))
def test_random_trees(seed: int, num_trajectories: int, model_type: str):
    rng = np.random.default_rng(seed)
    words = [rng.integers(0, VOCAB_SIZE, rng.integers(2, 160))]
    while len(words) < num_trajectories:
        parent = words[rng.integers(len(words))]
        kept, added = rng.integers(0, parent.size + 1), rng.integers(1, 90)
        words.append(np.concatenate([parent[:kept], rng.integers(0, VOCAB_SIZE, added)]))
    trajectories = decorate([words[i] for i in rng.permutation(len(words))], rng)
    if any(t.loss_mask.any() for t in trajectories):
        model = tiny_model(model_type, dtype=torch.float64)
        assert_step_equals_oracle(model, trajectories, FULL, expected=step_of(model, trajectories, FULL))


def test_order_and_duplicates_do_not_matter():
    trajectories = list(trajectories_of(RICH))
    model = harts.prepare(tiny_model("qwen3_5_text", dtype=torch.float64))
    steps = []
    doubled = [replace(t, weight=t.weight / 2) for t in trajectories for _ in range(2)]
    for variant in (trajectories, trajectories[::-1], doubled):
        model.module.zero_grad()
        # By token: normalising by group would see other groups, which the doubled list does not have.
        harts.train_step(model, variant, harts.dapo(kl_coef=0.1))
        steps.append(gradients(model.module))
    for other in steps[1:]:
        assert_gradients_close(steps[0], other, ratio=EXACT)


def test_two_steps_are_bit_equal():
    model = harts.prepare(tiny_model("qwen3_5_text"))
    trajectories, runs = trajectories_of(RICH), []
    for _ in range(2):
        model.module.zero_grad()
        result = harts.train_step(model, trajectories, FULL)
        runs.append((result.logprobs_P, gradients(model.module)))
    assert np.array_equal(runs[0][0], runs[1][0])
    assert all(torch.equal(g, runs[1][1][name]) for name, g in runs[0][1].items())
