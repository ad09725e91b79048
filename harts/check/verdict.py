"""From differences to a verdict: what counts as exact, as rounding, as a leak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harts.check.differences import Differences

Verdict = Literal["exact", "within-noise", "differs"]
EXACT = 1e-10
"""Relative, for float64 with transformers' inner float32 casts lifted."""
ORDERS = 4.0
"""A few reruns show a part of the summation orders there are; trees may differ that much more."""
TRUTH = 1.05
"""How much larger than flat's the tree's error against a float64 truth may be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """All that a verdict reads."""

    tree: Differences
    """Tree against flat."""
    noise: dict[str, Differences]
    """Flat against flat: run again, packed otherwise, rounded otherwise."""
    tree_truth: Differences | None
    """Tree against the float64 model."""
    flat_truth: Differences | None
    """Flat against the float64 model."""
    max_abs_logprob: float
    """Largest magnitude of a log-prob, nats."""
    eps: float
    """Of the model's dtype."""


def judge(compared: Compared, *, is_float64: bool) -> Verdict:
    """Exact, within flat's own noise, or neither.

    Within noise means, for the log-probs and for every parameter's gradient: no further from flat than `ORDERS` times
    what flat is from itself (no less than one rounding), or no further from the truth than `TRUTH` times what flat is.
    Loads and losses of routers are part of exactness; with rounding, one near-tie moves them, so they are shown only.
    """
    tree = compared.tree
    if is_float64:
        scale = max(1.0, compared.max_abs_logprob)
        routed = tree.routing is None or (tree.routing.aux_loss <= EXACT and tree.routing.load_count == 0)
        close = tree.max_logprob <= EXACT * scale and tree.max_gradient <= EXACT
        return "exact" if close and routed else "differs"
    if tree.max_logprob == tree.max_gradient == 0:
        return "exact"
    within = _logprobs_within(compared) and all(_gradient_within(compared, name) for name in tree.gradients)
    return "within-noise" if within else "differs"


def noise_of(compared: Compared, name: str) -> float:
    """How far flat's gradient of a parameter is from itself, in the unit of `Differences.gradients`."""
    return max(d.gradients[name] for d in compared.noise.values())


def leaks(moved: float, noise: float, eps: float) -> bool:
    """Whether a layer's output moved by more than rounding when only other branches changed.

    Equal rows can round differently where another expert has more tokens now; flat's own noise tells by how much.
    """
    return moved > ORDERS * (noise + 2 * eps)


def _logprobs_within(compared: Compared) -> bool:
    rounding = compared.eps * compared.max_abs_logprob
    noise = max(rounding, *(d.max_logprob for d in compared.noise.values()))
    if compared.tree.max_logprob <= ORDERS * noise:
        return True
    tree, flat = compared.tree_truth, compared.flat_truth
    # The mean tells systematic errors; a single token's is a matter of luck, so it gets the other allowance.
    return (
        tree is not None
        and flat is not None
        and tree.mean_logprob <= TRUTH * flat.mean_logprob
        and tree.max_logprob <= ORDERS * flat.max_logprob
    )


def _gradient_within(compared: Compared, name: str) -> bool:
    rounding = compared.tree.gradient_rounding[name]
    if compared.tree.gradients[name] <= ORDERS * max(rounding, noise_of(compared, name)):
        return True
    tree, flat = compared.tree_truth, compared.flat_truth
    return tree is not None and flat is not None and tree.gradients[name] <= TRUTH * flat.gradients[name]
