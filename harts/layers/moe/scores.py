"""From router logits to probabilities and to the weights of chosen experts, for every kind of router."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scores = Literal["softmax", "sigmoid"]
"""What turns logits into probabilities over the experts; sigmoids are divided by their sum, as in DeepSeek-V3."""


def probabilities(logits_TX: Tensor, scores: Scores) -> Tensor:
    """[T, X], each row adds up to 1; in float32 at least."""
    logits_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    if scores == "softmax":
        return logits_TX.softmax(-1)
    sigmoid_TX = logits_TX.sigmoid()
    return sigmoid_TX / sigmoid_TX.sum(-1, keepdim=True)


def logit_gradient(logits_TX: Tensor, slope_TX: Tensor, scores: Scores) -> Tensor:
    """Gradient at the logits of `(slope_TX * probabilities(logits_TX)).sum()`, in closed form.

    Args:
        logits_TX: [T, X].
        slope_TX: [T, X], in float32 or float64.
        scores: Of the router.
    """
    p_TX = probabilities(logits_TX, scores)
    centred_TX = slope_TX - (slope_TX * p_TX).sum(-1, keepdim=True)
    if scores == "softmax":
        return p_TX * centred_TX
    return p_TX * centred_TX * (-logits_TX.to(p_TX.dtype)).sigmoid()


def chosen_softmax(logits_TX: Tensor, expert_TA: Tensor) -> Tensor:
    """[T, A]. Softmax over the chosen experts' logits alone (gpt-oss, Granite)."""
    return logits_TX.gather(1, expert_TA).softmax(-1)


def softmax_weights(logits_TX: Tensor, expert_TA: Tensor, *, renormalise: bool) -> Tensor:
    """[T, A]. The chosen experts' share of a softmax over all, divided by their sum if asked for."""
    weight_TA = probabilities(logits_TX, "softmax").gather(1, expert_TA)
    return weight_TA / weight_TA.sum(-1, keepdim=True) if renormalise else weight_TA


def sigmoid_weights(logits_TX: Tensor, expert_TA: Tensor, *, renormalise: bool, floor: float, scale: float) -> Tensor:
    """[T, A]. The chosen experts' sigmoids, divided by their sum plus `floor` if asked for, times `scale`."""
    weight_TA = logits_TX.sigmoid().gather(1, expert_TA)
    if renormalise:
        weight_TA = weight_TA / (weight_TA.sum(-1, keepdim=True) + floor)
    return weight_TA * scale
