"""Which models run on trees. Fails closed: what is not known here is refused by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.modeling_layers import GradientCheckpointingLayer

from harts.models.family import Family, layer_types_of

# model_type -> module in harts/models/families; imported when asked for, since transformers' classes load slowly.
FAMILIES = {
    "bailing_hybrid": "bailing_hybrid",
    "deepseek_v3": "deepseek_v3",
    "kimi_linear": "kimi_linear",
    "olmo_hybrid": "olmo_hybrid",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt_oss",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "llama": "llama",
    "minimax": "minimax",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "bamba": "bamba",
    "falcon_h1": "falcon_h1",
    "granitemoehybrid": "granitemoehybrid",
    "jamba": "jamba",
    "nemotron_h": "nemotron_h",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "zamba2": "zamba2",
}

# Types of multimodal models -> the type of their text part, which is what runs on trees.
TEXT_TYPES = {
    "dots3_note": "dots3_note_text",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "glm5_next": "glm5_next_text",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral_large4": "mistral_large4_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}

# Model types that users ask for and that do not run on trees, each with the reason.
_INDEXED = "an indexer picks the keys that a query attends to, by a mask of its own over all packed tokens"
_STATE_SPACE_ALONE = "nothing but state-space layers: no family file states how they run on trees"
REFUSED: dict[str, str] = {
    "axk2": _INDEXED,
    "deepseek_v32": _INDEXED,
    "deepseek_v4": "attention to entries that compress several tokens, some of which an indexer picks",
    "dots3_note_text": _INDEXED,
    "falcon_mamba": _STATE_SPACE_ALONE,
    "gemma2": "tanh caps on attention scores and logits, which neither tree attention nor the log-probs apply",
    "gemma3n_text": "layers attend to keys and values of other layers, and a tanh cap on logits is not applied",
    "glm5_next_text": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "hy_v4": _INDEXED,
    "llama4_text": "attention within chunks of positions, and queries scaled by their packed place",
    "mamba": _STATE_SPACE_ALONE,
    "mamba2": _STATE_SPACE_ALONE,
    "minimax_m3_vl_text": "an indexer picks blocks of keys, which are counted in packed places instead of positions",
    "mistral_large4_text": _INDEXED,
    "qwen4_exp_text": _INDEXED,
    "recurrent_gemma": "RG-LRU layers keep their state on the module and have no tree layer",
    "rwkv": "its token recurrence, and the time shift before it and before each MLP, have no tree layers",
    "t5": "encoder and decoder instead of one causal sequence",
    "xlstm": "mLSTM layers, whose states carry a normaliser and a running maximum, have no tree layer",
    "zaya": "attention convolves queries and keys and delays values, for which there is no tree layer",
}

# Rotary position types that look at the batch.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

# Settings under which a token's experts depend on chance or on the other tokens of a batch, each off where falsy.
ROUTING_TOGETHER = (
    "router_jitter_noise",
    "input_jitter_noise",
    "moe_jitter_eps",
    "moe_token_dropout",
    "expert_capacity",
    "capacity_factor",
    "moe_capacity_factor",
)

# Packages whose modules work on every token alone (activations), or wrap modules that are checked themselves.
TOKEN_WISE_PACKAGES = (
    *("transformers.activations", "torch._dynamo.eval_frame"),
    *(f"liger_kernel.transformers.{name}" for name in ("rms_norm", "layer_norm", "swiglu", "geglu")),
)
TOKEN_WISE_CLASSES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.SiLU, nn.GELU, nn.ReLU)
# By name, since peft need not be installed. Its other layers (convolutions, attention) mix tokens.
ADAPTER_CLASSES = tuple(f"peft.tuners.lora.layer.{name}" for name in ("Linear", "Embedding", "ParamWrapper"))
CONTAINER_CLASSES = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential)


def supported_types() -> list[str]:
    """Every `model_type` that runs on trees and that the installed transformers has, sorted."""
    return sorted(name for name in FAMILIES if name in CONFIG_MAPPING)


def family_of_type(model_type: str) -> tuple[str, Family]:
    """The `model_type` of the text model behind a type, and its family.

    Raises:
        ValueError: If the type is not supported, refused, or not in the installed transformers.
    """
    name = TEXT_TYPES.get(model_type, model_type)
    if name not in FAMILIES:
        reason = f" ({REFUSED[name]})" if name in REFUSED else ""
        raise ValueError(
            f"Model type {model_type!r} does not run on trees{reason}; supported are {', '.join(supported_types())}. "
            'Prepare it with flat_only=True and train it with execution="flat", or state in '
            "harts/models/families how its layers run on trees."
        )
    if name not in CONFIG_MAPPING:
        raise ValueError(f"The installed transformers has no model type {name!r}. Install a newer one.")
    family: Family = import_module(f"harts.models.families.{FAMILIES[name]}").FAMILY
    return name, family


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    """What HARTS says about one model type."""

    model_type: str
    """As in a configuration."""
    layer_kinds: tuple[str, ...]
    """What its layers are; empty unless it is supported."""
    supported: bool
    """Whether it runs on trees with the installed transformers."""
    reason: str
    """Why not, or what is to be known; may be empty if it is supported."""


def model_table() -> tuple[ModelRow, ...]:
    """Every model type that is known, supported or refused, sorted by name; types not in it are refused as well.

    Example:
        >>> {row.model_type: row.supported for row in model_table()}["llama"]
        True
    """
    rows = []
    for model_type in sorted({*FAMILIES, *TEXT_TYPES, *REFUSED}):
        name = TEXT_TYPES.get(model_type, model_type)
        supported = name in FAMILIES and name in CONFIG_MAPPING
        reason = "" if name == model_type else f"the text part, {name}"
        if not supported:
            reason = REFUSED.get(name, f"transformers {transformers_version}, which is installed, has no {name}")
        layer_kinds = family_of_type(name)[1].layer_kinds if supported else ()
        rows.append(ModelRow(model_type=model_type, layer_kinds=layer_kinds, supported=supported, reason=reason))
    return tuple(rows)


def find_family(config: PreTrainedConfig) -> Family:
    """The family of a configuration.

    Raises:
        ValueError: If its `model_type`, one of its layer types or one of its settings does not run on trees.
    """
    _, family = family_of_type(config.model_type)
    config = config.get_text_config()
    unknown = sorted(set(layer_types_of(config)) - family.layer_types)
    if unknown:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(unknown)}, which do not run on trees; "
            f"supported are {', '.join(sorted(family.layer_types))}. Choose a configuration without them."
        )
    settings = config.to_dict()
    _check_rotary_positions(config.model_type, settings.get("rope_parameters") or {})
    for name in ROUTING_TOGETHER:
        if settings.get(name):
            raise ValueError(
                f"{config.model_type} has {name} = {settings[name]}: trajectories that share a token would have to "
                "share the experts that chance or the batch gives it. HARTS routes by scores alone and drops no "
                f"token. Set config.{name} to 0, or remove it."
            )
    for name, expected in family.required.items():
        if settings[name] != expected:
            raise ValueError(
                f"{name} is {settings[name]}, expected {expected}: with anything else, trees of {config.model_type} "
                f"would not compute what each trajectory computes alone. Set config.{name} to {expected}."
            )
    return family


def _check_rotary_positions(model_type: str, rope_parameters: Mapping[str, Any]) -> None:
    """Refuse frequencies that depend on the longest sequence of a batch; parameters may be given by layer type."""
    kinds = [rope_parameters, *(v for v in rope_parameters.values() if isinstance(v, dict))]
    for rope_type in (kind["rope_type"] for kind in kinds if "rope_type" in kind):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            raise ValueError(
                f"{model_type} has rotary positions of type {rope_type!r}, whose frequencies depend on the longest "
                "trajectory that is computed together. Choose another rope_type, such as yarn."
            )


def check_modules(model: PreTrainedModel, family: Family) -> None:
    """Refuse a model with a module whose class nobody has checked on trees, or with active dropout.

    A class counts as known if its `forward` is a known class's own, so wrappers that only add hooks pass and a
    subclass that computes something else does not.

    Raises:
        ValueError: Naming the module and its class.
    """
    known = {*family.tree_classes, *family.attention_classes, *family.token_wise_classes}
    known |= {*TOKEN_WISE_CLASSES, *CONTAINER_CLASSES, family.causal_lm}
    mixers = [cls for cls in family.tree_classes if not issubclass(cls, GradientCheckpointingLayer)]
    layers = [m for m in model.modules() if type(m) in mixers]  # not whole decoder layers, which hold other modules
    # The tree class of a layer runs its convolution; anywhere else one would reach into the branch before.
    convolutions = {child for layer in layers for child in layer.children() if type(child) is nn.Conv1d}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            if module.p > 0:
                raise ValueError(
                    f"{name} drops out with p = {module.p}: trajectories that share a token would need different "
                    "masks for it. Set the model's dropout to 0."
                )
            continue
        owner = _forward_owner(type(module))
        if owner in family.tree_classes and type(module) is not owner:
            raise ValueError(
                f"{name} is a {type(module).__qualname__}, a subclass of {owner.__qualname__}: it would not be "
                f"replaced by the layer that runs on trees. Prepare the model before it is wrapped."
            )
        path = f"{owner.__module__}.{owner.__qualname__}"
        is_known = not known.isdisjoint({owner, _entry_of(owner)}) or module in convolutions
        if not (is_known or path.startswith(TOKEN_WISE_PACKAGES) or path in ADAPTER_CLASSES):
            raise ValueError(
                f"{name or 'The model'} is a {path}, which HARTS does not know: it may carry state from one branch of "
                "a tree into another. Remove it, or state in "
                f"harts/models/families/{FAMILIES[model.config.model_type]}.py how it runs on trees."
            )


def _entry_of(cls: type[nn.Module]) -> object:
    """What the module of a class has under its name.

    Another class where a library like Liger put its own there, maybe before the family read it.
    """
    module = sys.modules.get(cls.__module__)
    return None if module is None else vars(module).get(cls.__qualname__)


def _forward_owner(cls: type[nn.Module]) -> type[nn.Module]:
    """The class in the inheritance order that defines `forward`; containers define none and stand for themselves."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    return cls if owner is nn.Module else owner
