"""Small random models of every supported type, built offline; for tests, checks and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from harts.models.registry import family_of_type


def tiny_model(
    model_type: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A random causal LM of a few thousand parameters, in training mode.

    Every parameter is moved off its initial constant, so that no norm or gate is trivial.

    Args:
        model_type: One of `supported_types()`, or the type of a multimodal model with such a text part.
        dtype: Of the parameters.
        seed: Of the weights; the global generator is left as it was.
        overrides: Settings of the configuration to replace.

    Raises:
        ValueError: For a model type that does not run on trees.
    """
    name, family = family_of_type(model_type)
    config = AutoConfig.for_model(name, **{**family.tiny, **(overrides or {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=family.attention.implementation, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()
