"""Small random models of every supported type, built offline; for tests, checks and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
_GATED_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "partial_rotary_factor": 0.5,
}
# Experts one by one: the grouped kernels of transformers know no float64.
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "experts_implementation": "eager",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3": _COMMON,
    "qwen3_5_text": {
        **_COMMON,
        **_GATED_DELTA_NET,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "qwen3_next": {**_COMMON, **_GATED_DELTA_NET, **_EXPERTS},
}


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
        model_type: One of `SETTINGS`.
        dtype: Of the parameters.
        seed: Of the weights; the global generator is left as it was.
        overrides: Settings of the configuration to replace.

    Raises:
        ValueError: For an unknown model type.
    """
    if model_type not in SETTINGS:
        raise ValueError(f"No tiny model of type {model_type!r}; there are {', '.join(sorted(SETTINGS))}.")
    config = AutoConfig.for_model(model_type, **{**SETTINGS[model_type], **(overrides or {})})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).train()
