"""What a family states about its transformers classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from harts.layout.packed import LayoutNeeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How models of one `model_type` run on trees.

    Every class that mixes tokens is named here, and so is every class of the family that does not: a module of any
    other class is refused, since nobody has checked that it keeps branches apart.
    """

    causal_lm: type[PreTrainedModel]
    """The transformers class with the LM head."""
    layer_types: frozenset[str]
    """Entries of `config.layer_types` that run on trees."""
    tree_classes: Mapping[type[nn.Module], type[nn.Module]]
    """Layer class -> its subclass that runs on a `PackedLayout`; parameters and names stay as they are."""
    attention_classes: frozenset[type[nn.Module]]
    """Classes that mix tokens through transformers' attention interface only."""
    token_wise_classes: frozenset[type[nn.Module]]
    """Classes that work on every token alone, and containers."""
    layout_needs: Callable[[PreTrainedConfig], LayoutNeeds]
    """What the layers of a configuration index with."""
    active_experts: Callable[[PreTrainedConfig], float] = lambda config: 1.0
    """Share of the experts' parameters that a token passes through."""
