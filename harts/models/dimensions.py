"""From a transformers configuration to the plain numbers that costs follow from."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from harts.models.registry import find_family
from harts.plan.cost import ModelDimensions


def model_dimensions(config: PreTrainedConfig, *, bytes_per_element: int = 2) -> ModelDimensions:
    """Count a model's parameters and widths without allocating it.

    Args:
        config: Of a supported causal LM; of a model with images, its text part is read.
        bytes_per_element: Of the dtype it will train in.

    Raises:
        ValueError: If the model type does not run on trees.

    Example:
        >>> from transformers import Qwen3Config
        >>> model_dimensions(Qwen3Config()).num_full_attention_layers
        32
    """
    config = config.get_text_config()
    family = find_family(config)
    needs = family.layout_needs(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer_types = config.layer_types or ["full_attention"] * config.num_hidden_layers
    num_linear, num_windows = layer_types.count("linear_attention"), layer_types.count("sliding_attention")
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(p) for part in (embeddings, head) for p in part.parameters()}
    inside = [(name, p.numel()) for name, p in model.named_parameters() if id(p) not in outside]
    experts = sum(count for name, count in inside if ".experts." in name)
    return ModelDimensions(
        num_dense_parameters=sum(count for _, count in inside) - experts,
        num_expert_parameters=round(experts * family.active_experts(config)),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_full_attention_layers=layer_types.count("full_attention"),
        windows=(config.sliding_window,) * num_windows if num_windows else (),
        attention_width=config.num_attention_heads * config.head_dim,
        num_linear_layers=num_linear,
        linear_heads=config.linear_num_value_heads if num_linear else 0,
        linear_key_dim=config.linear_key_head_dim if num_linear else 0,
        linear_value_dim=config.linear_value_head_dim if num_linear else 0,
        chunk_size=needs.chunk_size if num_linear else None,
        saved_elements_per_token=_saved_by_projections(model, head, family.active_experts(config))
        + (num_linear * _saved_by_chunks(config, needs.chunk_size) if num_linear and needs.chunk_size else 0),
        bytes_per_element=bytes_per_element,
    )


def _saved_by_projections(model: nn.Module, head: nn.Module, active_experts: float) -> int:
    """Inputs and outputs of all projections: the former for the gradient of their weights, the latter for what acts
    on them (rotation, gate, convolution, attention)."""
    total = 0
    for parent in model.modules():
        linears = [m for m in parent.children() if isinstance(m, nn.Linear) and m is not head]
        # Projections of one module that are as wide read the same tensor, which is kept once.
        total += sum({m.in_features for m in linears}) + sum(m.out_features for m in linears)
    # Experts are stacked as [X, out, in].
    stacked = [p for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3]
    return total + round(sum(active_experts * p.shape[0] * (p.shape[1] + p.shape[2]) for p in stacked))


def _saved_by_chunks(config: PreTrainedConfig, chunk_size: int) -> int:
    """What a fused kernel of one linear-attention layer keeps a token: keys and values of the chunk rule, a row of
    scores, and a state a chunk. Plain PyTorch keeps several times as much; `harts calibrate` measures it."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    return config.linear_num_value_heads * (2 * key + 2 * value + chunk_size + key * value // chunk_size)
