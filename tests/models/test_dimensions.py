"""Dimensions of the tiny models, against the models themselves."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import GPT2Config

import harts
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.packed import pack
from harts.models.dimensions import model_dimensions
from harts.models.registry import family_of_type, supported_types
from harts.models.tiny import tiny_model
from harts.plan.cost import CostModel, CostParameters
from harts.tree import build_prefix_tree


@pytest.mark.parametrize("model_type", supported_types())
def test_parameters_and_layers_are_the_models(model_type: str):
    model = tiny_model(model_type)
    d = model_dimensions(model.config)
    experts_per_token = family_of_type(model_type)[1].active_experts(model.config)
    total = sum(p.numel() for p in model.parameters()) - 2 * d.vocab_size * d.hidden_size
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert d.num_dense_parameters == total - routed
    assert d.num_expert_parameters == round(routed * experts_per_token)
    assert (routed > 0) == (experts_per_token < 1)
    assert (d.num_linear_layers > 0) == (d.linear_heads > 0) == (d.linear_key_dim > 0) == (d.linear_value_dim > 0)
    assert d.num_full_attention_layers + len(d.windows) > 0
    assert d.attention_width > 0


def test_pair_costs_agree_with_what_a_prepared_model_plans_with():
    model = tiny_model("qwen3_5_text")
    cost = CostParameters.of_dimensions(model_dimensions(model.config))
    planned: CostModel = harts.prepare(model).cost
    assert cost.per_pair == planned.flops_per_pair


def test_saved_elements_are_what_autograd_keeps_within_a_factor_of_two():
    # Full attention only: the chunk rule in plain PyTorch keeps more than the kernels that the estimate is for.
    model = harts.prepare(tiny_model("qwen3"))
    batch = TrajectoryBatch.of([Trajectory.of(list(range(90)))])
    layout = pack(build_prefix_tree(batch), batch, model.needs)
    parameters = {p.data_ptr() for p in model.module.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TD = model.hidden_states(layout)
    estimate = model_dimensions(model.module.config).saved_elements_per_token * hidden_TD.shape[0]
    assert 0.5 < sum(kept.values()) / estimate < 2.0


def test_an_unsupported_model_is_named():
    with pytest.raises(ValueError, match="gpt2"):
        model_dimensions(GPT2Config())
