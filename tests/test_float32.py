"""float32 against the unmodified model, whose own rounding sets the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import harts
from harts.data import Trajectory
from harts.models.registry import supported_types
from harts.models.tiny import tiny_model
from harts.testing import gradients, one_trajectory_at_a_time
from tests.cases import ANCHORS, BESIDE, CASES, QUICK_CASES, RICH, ROUNDED_IN_TRANSFORMERS, Case, trajectories_of
from tests.routing import follow_routes

OBJECTIVE = harts.grpo(kl_coef=0.1, entropy_coef=0.05)
HYBRID = "qwen3_5_text"
"""Of `ANCHORS`, the one that runs on several cases by default."""
ORDERS = 4
"""Summation orders that flat's own noise is the largest difference over."""


@pytest.mark.parametrize(
    ("model_type", "case"),
    # What is marked slow is held in float64 by default.
    [(name, BESIDE) for name in supported_types() if name not in ANCHORS]
    + [pytest.param(name, RICH, marks=pytest.mark.slow) for name in supported_types() if name not in ANCHORS]
    + [
        pytest.param(
            name, case, marks=[] if case in (QUICK_CASES if name == HYBRID else [RICH]) else [pytest.mark.slow]
        )
        for name in ANCHORS
        for case in CASES
    ],
    ids=lambda value: value.name if isinstance(value, Case) else value,
)
def test_tree_differs_from_flat_no_more_than_flat_from_itself(case: Case, model_type: str):
    trajectories = trajectories_of(case)
    logprobs, expected = flat(tiny_model(model_type), trajectories)
    scale = torch.stack([g.norm() for g in expected.values()]).norm()
    noise = dict.fromkeys(expected, torch.finfo(torch.float32).eps * scale)
    logprob_noise = np.float64(np.finfo(np.float32).eps * np.abs(logprobs).max())
    for seed in range(ORDERS):
        other_logprobs, other = flat_in_another_order(tiny_model(model_type), trajectories, seed)
        logprob_noise = np.maximum(logprob_noise, np.abs(other_logprobs - logprobs).max())
        noise = {name: torch.maximum(n, (other[name] - expected[name]).norm()) for name, n in noise.items()}

    model = harts.prepare(tiny_model(model_type))
    result = harts.train_step(model, trajectories, OBJECTIVE)
    actual = gradients(model.module)
    assert np.abs(result.logprobs_P - logprobs).max() <= 4 * logprob_noise
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 4 * noise[name], name


def flat(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> tuple[np.ndarray, dict[str, Tensor]]:
    logprobs, _ = one_trajectory_at_a_time(model, trajectories, OBJECTIVE)
    return logprobs.double().numpy(), gradients(model)


def one_each(order: Tensor) -> Tensor:
    return order


def halves(order: Tensor) -> Tensor:
    return torch.cat([order, order + order.numel()])


def pairs(order: Tensor) -> Tensor:
    return torch.stack([2 * order, 2 * order + 1], dim=-1).flatten()


# Of every kind of MLP: the axis of a parameter along which the neurons lie, and in what order.
NeuronAxes = dict[str, tuple[int, Callable[[Tensor], Tensor]]]
MLPS: list[NeuronAxes] = [
    {"gate_proj.weight": (0, one_each), "up_proj.weight": (0, one_each), "down_proj.weight": (1, one_each)},
    {"w1.weight": (0, one_each), "w3.weight": (0, one_each), "w2.weight": (1, one_each)},
    {"input_linear.weight": (0, halves), "output_linear.weight": (1, one_each)},
    # Zamba2's two shared blocks, each with an adapter for every layer that runs it.
    {
        "gate_up_proj.weight": (0, halves),
        "gate_up_proj_adapter_list.0.1.weight": (0, halves),
        "gate_up_proj_adapter_list.2.1.weight": (0, halves),
        "down_proj.weight": (1, one_each),
    },
    {
        "gate_up_proj.weight": (0, halves),
        "gate_up_proj_adapter_list.1.1.weight": (0, halves),
        "down_proj.weight": (1, one_each),
    },
    {"up_proj.weight": (0, one_each), "down_proj.weight": (1, one_each)},
]
EXPERTS: list[NeuronAxes] = [
    {"gate_up_proj": (2, pairs), "gate_up_proj_bias": (1, pairs), "down_proj": (1, one_each)},
    {"gate_up_proj": (1, halves), "down_proj": (2, one_each)},
]


def with_neurons(model: nn.Module, kinds: list[NeuronAxes]) -> list[tuple[str, nn.Module, NeuronAxes]]:
    found = []
    for name, module in model.named_modules():
        names = dict(module.named_parameters()).keys()
        found += [(name, module, kind) for kind in kinds if names >= kind.keys()][:1]
    return found


def flat_in_another_order(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], seed: int
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """The same function with the neurons of every MLP renumbered, so that only sums change their order.

    Those of experts where a model has nothing else.
    """
    generator = torch.Generator().manual_seed(seed)
    back: dict[str, tuple[int, Tensor]] = {}
    for name, mlp, axes in with_neurons(model, MLPS) or with_neurons(model, EXPERTS):
        parameters = dict(mlp.named_parameters())
        down, (down_axis, _) = list(axes.items())[-1]
        order = torch.randperm(parameters[down].shape[down_axis], generator=generator)
        for key, (axis, numbered) in axes.items():
            with torch.no_grad():
                parameters[key].copy_(parameters[key].index_select(axis, numbered(order)).clone())
            back[f"{name}.{key}"] = (axis, numbered(order).argsort())
    assert back, "no MLP is known, so nothing was renumbered"
    logprobs, reordered = flat(model, trajectories)
    for name, (axis, order) in back.items():
        reordered[name] = reordered[name].index_select(axis, order)
    return logprobs, reordered


@pytest.mark.parametrize(
    "model_type",
    [
        # tests/models/test_rounding.py looks at every layer of all families.
        pytest.param(name, marks=[] if name in (*ANCHORS, *ROUNDED_IN_TRANSFORMERS) else [pytest.mark.slow])
        for name in supported_types()
    ],
)
def test_bfloat16_error_is_flats(model_type: str):
    """Against a float32 truth, the tree's bfloat16 log-probs are no worse than those of trajectory-wise bfloat16."""
    exact = harts.prepare(tiny_model(model_type, dtype=torch.bfloat16).float())
    trajectories = follow_routes(exact, trajectories_of(RICH))
    truth = harts.compute_logprobs(exact, trajectories, execution="flat")
    model = harts.prepare(tiny_model(model_type, dtype=torch.bfloat16))
    errors = {}
    for execution in ("tree", "flat"):
        logprobs_P = harts.compute_logprobs(model, trajectories, execution=execution)
        errors[execution] = np.sqrt(np.mean((logprobs_P - truth) ** 2))
    # Errors of other roundings are others, and a few hundred log-probs tell their size to a tenth.
    ratio = 1.25 if model_type in ROUNDED_IN_TRANSFORMERS else 1.05
    assert 0 < errors["tree"] <= ratio * errors["flat"]


def test_without_replay_results_visibly_change():
    """The alignment test can fail: moved chunk boundaries leave float32 log-probs several times further from flat."""
    trajectories = trajectories_of(RICH)
    logprobs, _ = flat(tiny_model("qwen3_5_text"), trajectories)
    distance = {}
    for replay in (True, False):
        model = harts.prepare(tiny_model("qwen3_5_text"), replay=replay)
        result = harts.train_step(model, trajectories, OBJECTIVE)
        assert (result.num_replayed > 0) == replay
        distance[replay] = np.sqrt(np.mean((result.logprobs_P - logprobs) ** 2))
    assert distance[False] > 3 * distance[True]
