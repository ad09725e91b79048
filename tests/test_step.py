"""The step as a function: leaks, threads, interleaved layouts, and every error a caller can make."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import harts
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.packed import PackedLayout, pack
from harts.logprobs import linear_logprobs
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.testing import assert_close, gradients, one_trajectory_at_a_time
from harts.tree import build_prefix_tree
from tests.cases import ANCHORS, BESIDE, CASES, RICH, Case, trajectories_of

OBJECTIVE = harts.grpo(kl_coef=0.1)
MODEL_TYPES = supported_types()
GOOD = Trajectory.of([1, 2, 3], sampling_logprobs=-1.0, ref_logprobs=-1.0)


def lay_out(model: harts.TreeModel, trajectories: Sequence[Trajectory]) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories)
    return pack(build_prefix_tree(batch), batch, model.needs)


def logprob_sum(model: harts.TreeModel, layout: PackedLayout) -> Tensor:
    return linear_logprobs(model.hidden_states(layout), model.head, layout.edges)[0].sum()


@pytest.mark.parametrize(
    ("case", "model_type"),
    [(case, name) for name in MODEL_TYPES for case in (CASES if name in ANCHORS else [BESIDE])],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_a_token_moves_nothing_outside_its_subtree(case: Case, model_type: str):
    """Perturbation finds leaks of recurrent states that no look at a mask finds."""
    model = harts.prepare(tiny_model(model_type))
    layout = lay_out(model, trajectories_of(case))
    embeddings = model.module.get_input_embeddings()(layout.token_ids_T).detach().requires_grad_()
    replaced = model.module.get_input_embeddings().register_forward_hook(lambda *_: embeddings[None])
    hidden_TD = model.hidden_states(layout)
    replaced.remove()
    ends = layout.subtree_end_T.tolist()
    for token in np.linspace(0, layout.num_tokens - 1, 9).astype(int).tolist():
        (gradient,) = torch.autograd.grad(hidden_TD[token].sum(), embeddings, retain_graph=True)
        ancestors = [a for a in range(token + 1) if ends[a] > token]
        reached = gradient.abs().sum(-1).nonzero()[:, 0].tolist()
        assert set(reached) <= set(ancestors)
        assert {token, 0} & set(ancestors) <= set(reached) | {0}, "the token itself is always reached"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_changing_a_sibling_changes_no_other_bit(model_type: str):
    trajectories = list(trajectories_of(RICH))
    model = harts.prepare(tiny_model(model_type))
    before = harts.compute_logprobs(model, trajectories)
    changed = trajectories[1]
    ids = changed.token_ids.copy()
    ids[-1] = (ids[-1] + 1) % 97
    after = harts.compute_logprobs(model, [trajectories[0], replace(changed, token_ids=ids), *trajectories[2:]])
    batch = TrajectoryBatch.of(trajectories)
    other_P = batch.trajectory_P != 1
    assert np.array_equal(before[other_P], after[other_P])
    assert not np.array_equal(before[~other_P], after[~other_P])


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": True}, {"use_reentrant": False}])
def test_two_layouts_alive_and_backward_on_another_thread(checkpointing: dict[str, bool] | None):
    """Nothing is found through a global: two forwards, then both backwards in another order on another thread."""
    module = tiny_model("qwen3_5_text", dtype=torch.float64)
    if checkpointing is not None:
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model = harts.prepare(module)
    layouts = [lay_out(model, trajectories_of(case)) for case in (RICH, CASES[3])]
    for layout in layouts:
        logprob_sum(model, layout).backward()
    expected = gradients(module)

    module.zero_grad()
    losses = [logprob_sum(model, layout) for layout in layouts]
    thread = threading.Thread(target=lambda: [loss.backward() for loss in losses])
    thread.start()
    thread.join()
    for name, gradient in gradients(module).items():
        assert torch.equal(gradient, expected[name]), name


def test_forward_twice_then_backward():
    model = harts.prepare(tiny_model("qwen3_5_text", dtype=torch.float64))
    layout = lay_out(model, trajectories_of(RICH))
    logprob_sum(model, layout).backward()
    once = gradients(model.module)
    model.module.zero_grad()
    (logprob_sum(model, layout) + logprob_sum(model, layout)).backward()
    for name, gradient in gradients(model.module).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("execution", ["tree", "flat"])
def test_a_microbatch_without_trained_tokens(execution: harts.Execution):
    masked = Trajectory.of([9, 8, 7], loss_mask=np.zeros(3), sampling_logprobs=0.0, ref_logprobs=0.0)
    model = harts.prepare(tiny_model("qwen3_5_text"))
    objective = harts.gspo(kl_coef=0.1, entropy_coef=0.1)
    alone = harts.train_step(model, [GOOD], objective, execution=execution)
    result = harts.train_step(model, [GOOD, masked], objective, execution=execution, max_tokens_per_microbatch=3)
    assert result.num_microbatches == 2
    assert result.loss == alone.loss


def test_ids_may_be_lists_arrays_or_tensors_of_any_integer_type():
    ids = [5, 6, 7, 8]
    variants = [ids, np.array(ids, dtype=np.int32), torch.tensor(ids), torch.tensor([ids, ids]).T[:, 0]]
    model = harts.prepare(tiny_model("qwen3_5_text"))
    logprobs = [harts.compute_logprobs(model, [Trajectory.of(v)]) for v in variants]
    assert all(np.array_equal(logprobs[0], other) for other in logprobs[1:])


@pytest.mark.parametrize("execution", ["tree", "flat"])
def test_ratios_are_one_at_the_first_step(execution: harts.Execution):
    model = harts.prepare(tiny_model("qwen3_5_text"))
    trajectories = list(trajectories_of(RICH))
    logprobs_P, begin, sampled = harts.compute_logprobs(model, trajectories), 0, []
    for trajectory in trajectories:
        stream, count = np.zeros(len(trajectory)), int(trajectory.loss_mask.sum())
        stream[trajectory.loss_mask] = logprobs_P[begin : begin + count]
        sampled.append(replace(trajectory, sampling_logprobs=stream))
        begin += count
    result = harts.train_step(model, sampled, harts.gspo(), execution=execution)
    assert result.metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert result.metrics["clip_fraction_low"] + result.metrics["clip_fraction_high"] < (execution == "flat") + 1e-9


def test_logprobs_are_those_of_the_step():
    model = harts.prepare(tiny_model("qwen3_next"))
    trajectories = trajectories_of(RICH)
    expected = harts.train_step(model, trajectories, OBJECTIVE).logprobs_P
    assert np.array_equal(harts.compute_logprobs(model, trajectories), expected)


ERRORS = {
    "none": ([], "Got no trajectories"),
    "empty": ([GOOD, Trajectory.of([])], "Trajectory 1 has no tokens"),
    "vocabulary": ([GOOD, replace(GOOD, token_ids=np.array([1, 97, 3]))], "Trajectory 1 has token id 97 at position 1"),
    "negative": ([replace(GOOD, token_ids=np.array([1, -100, 3]))], "Trajectory 0 has the negative token id -100"),
    "mask": ([GOOD, replace(GOOD, loss_mask=np.array([False, True]))], r"Trajectory 1 .* loss_mask has shape \(2,\)"),
    "advantages": ([replace(GOOD, advantages=np.zeros(4))], r"Trajectory 0 .* advantages has shape \(4,\)"),
    "first_token": ([replace(GOOD, loss_mask=np.ones(3, bool))], "Trajectory 0 trains its first token"),
    "nan": ([GOOD, replace(GOOD, advantages=np.array([0, np.nan, 0]))], r"Trajectory 1 has advantages\[1\] = nan"),
    "infinite": (
        [replace(GOOD, ref_logprobs=np.array([0, 0, -np.inf]))],
        r"Trajectory 0 has ref_logprobs\[2\] = -inf",
    ),
    "temperature": ([replace(GOOD, temperature=0.0)], "Trajectory 0 has temperature 0"),
    "weight": ([replace(GOOD, weight=-1.0)], "Trajectory 0 has weight -1"),
    "some_lack": ([GOOD, replace(GOOD, ref_logprobs=None)], "Trajectory 1 has no ref_logprobs but others"),
    "missing": ([replace(GOOD, sampling_logprobs=None)], "sampling_logprobs"),
    "nothing_trained": ([replace(GOOD, loss_mask=np.zeros(3, bool))], "train"),
    "too_long": ([GOOD, Trajectory.of(range(50), sampling_logprobs=0, ref_logprobs=0)], r"Trajectory 1 .* 50 .* 40"),
}


@pytest.mark.parametrize(("trajectories", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_trajectory_and_the_fix(trajectories: list[Trajectory], message: str):
    model = harts.prepare(tiny_model("qwen3"))
    with pytest.raises(ValueError, match=message):
        harts.train_step(model, trajectories, OBJECTIVE, max_tokens_per_microbatch=40)
    assert all(p.grad is None for p in model.module.parameters())


def test_a_model_that_does_not_run_on_trees_trains_flat():
    config = AutoConfig.for_model(
        "olmo2", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    module = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="Prepare it with flat_only=True"):
        harts.prepare(module)
    logprobs, _ = one_trajectory_at_a_time(module, trajectories_of(RICH), OBJECTIVE)
    expected = gradients(module)
    module.zero_grad()
    model = harts.prepare(module, flat_only=True)
    result = harts.train_step(model, trajectories_of(RICH), OBJECTIVE, execution="flat")
    assert_close("log-probs", logprobs.double(), torch.from_numpy(result.logprobs_P), ratio=1e-5)
    for name, gradient in expected.items():
        assert_close(name, gradient, gradients(module)[name], ratio=1e-4)
    with pytest.raises(ValueError, match="prepared for flat execution only"):
        harts.train_step(model, trajectories_of(RICH), OBJECTIVE)


def test_logits_that_are_not_the_heads_are_refused():
    config = AutoConfig.for_model(
        "cohere", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(ValueError, match="logits of a CohereForCausalLM are not its LM head's"):
        harts.prepare(AutoModelForCausalLM.from_config(config), flat_only=True)


def test_unknown_execution_and_float_ids():
    model = harts.prepare(tiny_model("qwen3"))
    with pytest.raises(ValueError, match="execution is 'forest'"):
        harts.train_step(model, [GOOD], OBJECTIVE, execution="forest")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_ids are float64, expected integers"):
        Trajectory.of([1.0, 2.0])
