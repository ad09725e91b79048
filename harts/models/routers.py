"""The kinds of routers that several families share."""

from __future__ import annotations

from harts.layers.moe.scores import chosen_softmax, sigmoid_weights, softmax_weights
from harts.models.routing import Router

SOFTMAX = Router(
    scores="softmax", weights=lambda router, logits, experts: softmax_weights(logits, experts, renormalise=True)
)
"""Top-k of a softmax over all experts, divided by their sum."""
PLAIN_SOFTMAX = Router(
    scores="softmax", weights=lambda router, logits, experts: softmax_weights(logits, experts, renormalise=False)
)
"""Top-k of a softmax over all experts."""
SOFTMAX_BY_SETTING = Router(
    scores="softmax",
    weights=lambda router, logits, experts: softmax_weights(logits, experts, renormalise=router.norm_topk_prob),
)
"""Either of these, as the configuration says."""
CHOSEN_SOFTMAX = Router(scores="softmax", weights=lambda router, logits, experts: chosen_softmax(logits, experts))
"""Softmax over the logits of the top k."""
GROUPED_SIGMOID = Router(
    scores="sigmoid",
    weights=lambda router, logits, experts: sigmoid_weights(
        logits, experts, renormalise=router.norm_topk_prob, floor=1e-20, scale=router.routed_scaling_factor
    ),
    bias=lambda block: block.gate.e_score_correction_bias,
)
"""DeepSeek-V3's: sigmoids, chosen in groups with a correction bias."""
BIASED_SIGMOID = Router(
    scores="sigmoid",
    weights=lambda router, logits, experts: sigmoid_weights(
        logits, experts, renormalise=router.norm_topk_prob, floor=1e-6, scale=router.routed_scaling_factor
    ),
    bias=lambda block: block.expert_bias,
)
"""LFM2's: sigmoids, chosen with a correction bias that the block around the router holds."""
