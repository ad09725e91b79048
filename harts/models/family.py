"""What a family states about its transformers classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from harts.layout.packed import LayoutNeeds
from harts.models.attention import SDPA, DenseAttention
from harts.models.routing import Router


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixers:
    """How many layers of a model mix tokens, and how wide they are: what costs follow from."""

    num_full_attention_layers: int = 0
    """Layers of attention to all tokens before."""
    windows: tuple[int, ...] = ()
    """Tokens that each layer with sliding-window attention sees, the token itself included."""
    attention_width: int = 0
    """Query heads times head width of an attention layer; the mean of key and value width where they differ."""
    num_linear_layers: int = 0
    """Layers with a recurrent state."""
    linear_heads: int = 0
    """Heads with a state of their own, of such a layer."""
    linear_key_dim: int = 0
    """Rows of a head's state."""
    linear_value_dim: int = 0
    """Columns of a head's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How models of one `model_type` run on trees.

    Every class that mixes tokens is named here, and so is every class of the family that does not: a module of any
    other class is refused, since nobody has checked that it keeps branches apart.
    """

    causal_lm: type[PreTrainedModel]
    """The transformers class with the LM head."""
    layer_kinds: tuple[str, ...]
    """What its layers are, for `harts models`: "Gated DeltaNet", "attention", "MoE", ..."""
    attention: DenseAttention = SDPA
    """Attention implementation that its models are loaded with; what runs without a layout."""
    layer_types: frozenset[str]
    """Entries of `config.layer_types` that run on trees."""
    tree_classes: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    """Layer class -> its subclass that runs on a `PackedLayout`; parameters and names stay as they are."""
    attention_classes: frozenset[type[nn.Module]]
    """Classes that mix tokens through transformers' attention interface only."""
    token_wise_classes: frozenset[type[nn.Module]]
    """Classes that work on every token alone, and containers."""
    routers: Mapping[str, Router] = field(default_factory=dict)
    """Name of a class that routes tokens to experts -> what it computes; empty without mixtures of experts. By name,
    since not every transformers has every class."""
    layout_needs: Callable[[PreTrainedConfig], LayoutNeeds] = lambda config: LayoutNeeds(chunk_size=None, conv_width=1)
    """What the layers of a configuration index with."""
    mixers: Callable[[PreTrainedConfig], Mixers]
    """Numbers and widths of a configuration's layers that mix tokens."""
    tiny: Mapping[str, Any]
    """Settings of a configuration of a few thousand parameters that has every kind of layer."""
    active_experts: Callable[[PreTrainedConfig], float] = lambda config: 1.0
    """Share of the experts' parameters that a token passes through."""
    logit_scale: Callable[[PreTrainedConfig], float] = lambda config: 1.0
    """What the causal LM multiplies its logits by."""
    required: Mapping[str, Any] = field(default_factory=lambda: {"attention_dropout": 0.0})
    """Settings that must have one value for trees to be exact; a configuration with another is refused."""


def attention_mixers(config: PreTrainedConfig) -> Mixers:
    """Of a model with nothing but attention, whose `layer_types`, if any, tell windows from full attention."""
    layer_types = layer_types_of(config) or ["full_attention"] * config.num_hidden_layers
    num_windows = layer_types.count("sliding_attention")
    return Mixers(
        num_full_attention_layers=layer_types.count("full_attention"),
        windows=(config.sliding_window,) * num_windows if num_windows else (),
        attention_width=config.num_attention_heads * head_width(config),
    )


def layer_types_of(config: PreTrainedConfig) -> list[str]:
    """The kind of every layer; empty if the configuration does not tell kinds apart."""
    return config.to_dict().get("layer_types") or []


def head_width(config: PreTrainedConfig) -> int:
    """Width of an attention head; without `head_dim`, heads share the model's width."""
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads


def gated_delta_net_mixers(config: PreTrainedConfig) -> Mixers:
    """Of a model of Gated DeltaNet and full attention with the names of Qwen3-Next's configuration."""
    return Mixers(
        num_full_attention_layers=config.layer_types.count("full_attention"),
        attention_width=config.num_attention_heads * head_width(config),
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.linear_num_value_heads,
        linear_key_dim=config.linear_key_head_dim,
        linear_value_dim=config.linear_value_head_dim,
    )


def latent_attention_mixers(config: PreTrainedConfig) -> Mixers:
    """Of a model whose every layer is multi-head latent attention."""
    return Mixers(
        num_full_attention_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) // 2,
    )


def kimi_delta_mixers(config: PreTrainedConfig) -> Mixers:
    """Of a model of Kimi Delta Attention and multi-head latent attention."""
    return replace(
        latent_attention_mixers(config),
        num_full_attention_layers=config.layer_types.count("full_attention"),
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.linear_num_heads,
        linear_key_dim=config.linear_head_dim,
        linear_value_dim=config.linear_head_dim,
    )


TINY: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
)
"""What tiny models of most families have in common."""
TINY_WINDOWS: Mapping[str, Any] = MappingProxyType(
    {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_sliding_window": True,
        "sliding_window": 20,
    }
)
TINY_SHORT_CONVOLUTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": True,
        "tie_word_embeddings": False,
    }
)
TINY_GATED_DELTA_NET: Mapping[str, Any] = MappingProxyType(
    {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "partial_rotary_factor": 0.5,
    }
)
TINY_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        # One by one: the grouped kernels of transformers know no float64.
        "experts_implementation": "eager",
    }
)
TINY_LATENT_ATTENTION: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        # What rotary embeddings are built for.
        "head_dim": 4,
        "v_head_dim": 6,
    }
)
TINY_ROUTED_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 3,
        "topk_group": 2,
        "pad_token_id": None,
        "eos_token_id": None,
        "experts_implementation": "eager",
    }
)
TINY_KIMI_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_local_experts": 6,
    }
)
