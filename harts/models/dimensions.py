"""From a transformers model or configuration to the plain numbers that costs follow from."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from harts.models.family import Family, Mixers
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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return dimensions_of(model, family, bytes_per_element=bytes_per_element)


def dimensions_of(model: PreTrainedModel, family: Family, *, bytes_per_element: int = 2) -> ModelDimensions:
    """The same of a model that is there. Weights of adapters count as what they are: parameters of a projection."""
    config = model.config
    chunk_size, mixers = family.layout_needs(config).chunk_size, family.mixers(config)
    active = family.active_experts(config)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embeddings is not None and head is not None
    outside = {id(p) for part in (embeddings, head) for p in part.parameters()}
    inside = [(name, p.numel()) for name, p in model.named_parameters() if id(p) not in outside]
    experts = sum(count for name, count in inside if ".experts." in name)
    saved = _saved_by_projections(model, head, active) + mixers.num_linear_layers * _saved_by_chunks(mixers, chunk_size)
    return ModelDimensions(
        num_dense_parameters=sum(count for _, count in inside) - experts,
        num_expert_parameters=round(experts * active),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_full_attention_layers=mixers.num_full_attention_layers,
        windows=mixers.windows,
        attention_width=mixers.attention_width,
        num_linear_layers=mixers.num_linear_layers,
        linear_heads=mixers.linear_heads,
        linear_key_dim=mixers.linear_key_dim,
        linear_value_dim=mixers.linear_value_dim,
        chunk_size=chunk_size if mixers.num_linear_layers else None,
        saved_elements_per_token=saved,
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


def _saved_by_chunks(mixers: Mixers, chunk_size: int | None) -> int:
    """What a fused kernel of one linear-attention layer keeps a token: keys and values of the chunk rule, a row of
    scores, and a state a chunk. Plain PyTorch keeps several times as much; `harts calibrate` measures it."""
    if chunk_size is None:
        return 0
    key, value = mixers.linear_key_dim, mixers.linear_value_dim
    return mixers.linear_heads * (2 * key + 2 * value + chunk_size + key * value // chunk_size)
