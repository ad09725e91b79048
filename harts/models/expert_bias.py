"""Balancing without a loss: move each expert's correction bias against its load."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from harts.layers.moe.statistics import RouterStatistics
from harts.models.adapter import TreeModel


@torch.no_grad()
def update_expert_bias(
    model: TreeModel,
    statistics: RouterStatistics,
    *,
    rate: float = 1e-3,
    form: Literal["sign", "proportional"] = "sign",
) -> None:
    """Raise the biases of experts with less than the mean load and lower the others' (arXiv 2408.15664, algorithm 1).

    Call it once a step, after the optimiser, with the same statistics on every rank.

    Args:
        model: From `harts.prepare`, with routers that choose by scores plus a bias.
        statistics: Of the whole step: `StepResult.router`, added up over the ranks.
        rate: >= 0. What a bias moves by.
        form: "sign" (DeepSeek-V3) moves every bias by `rate`; "proportional" by `rate` times what the load lacks, as
            a share of the mean load.

    Raises:
        ValueError: If the routers have no bias, or the statistics are of other routers.

    Example:
        >>> harts.update_expert_bias(model, result.router, rate=1e-3)  # doctest: +SKIP
    """
    if form not in ("sign", "proportional"):
        raise ValueError(f'form is {form!r}, expected "sign" or "proportional".')
    if not rate >= 0:
        raise ValueError(f"rate is {rate}, expected a number >= 0. A negative one would send more to busy experts.")
    if statistics.num_tokens == 0:
        raise ValueError("Got statistics of no tokens, expected those of a step. Add up all ranks' before.")
    sites = model.routing.sites
    if statistics.layers != model.routing.layers:
        raise ValueError(
            f"Got statistics of {len(statistics.layers)} routers, expected those of the model's {len(sites)}. "
            "Take them from a step of this model."
        )
    unbiased = [site.name for site in sites if site.kind.bias is None]
    if unbiased or not sites:
        raise ValueError(
            f"The model's routers ({', '.join(unbiased) or 'none'}) have no correction bias. "
            'Balance them with a loss, such as harts.RouterLosses(balance="step", ...).'
        )
    lack_MX = 1 - statistics.load_MX / statistics.load_MX.mean(axis=1, keepdims=True)
    step_MX = rate * (np.sign(lack_MX) if form == "sign" else lack_MX)
    for site, step_X in zip(sites, step_MX, strict=True):
        assert site.kind.bias is not None
        bias_X = site.kind.bias(site.block)
        bias_X += torch.from_numpy(step_X).to(bias_X)
