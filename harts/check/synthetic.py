"""Rollouts of no environment, with every way in which the trajectories of agents part."""

from __future__ import annotations

import numpy as np

from harts.data import Trajectory


def synthetic_rollouts(vocab_size: int, *, unit: int = 64, seed: int = 0) -> list[Trajectory]:
    """Two groups of random tokens that branch where implementations go wrong.

    Siblings of one prompt; one sample per LLM call; branches on a chunk boundary, beside it, several in one chunk, and
    before the first boundary; segments shorter than a convolution; a trajectory that ends inside another; a duplicate.

    Args:
        vocab_size: W.
        unit: The model's chunk size, around whose multiples branches are placed.
        seed: Of the tokens and of what is trained.

    Returns:
        About 14 trajectories of up to 3.5 units.
    """
    rng = np.random.default_rng(seed)

    def fresh(n: int) -> np.ndarray:
        return rng.integers(0, vocab_size, n)

    prompt = fresh(unit + unit // 8)
    calls, context = [], prompt
    for turn in (unit // 2, unit - unit // 8, 3):  # the second ends two units and a half chunk below the root
        context = np.concatenate([context, fresh(turn)])
        calls.append(context)
    trunk = np.concatenate([prompt, fresh(2 * unit)])
    places = (2, unit, unit + 1, 2 * unit - 1, 2 * unit + 5, 2 * unit + 9)
    side = [np.concatenate([trunk[:p], fresh(n)]) for p, n in zip(places, (unit, 40, 1, 2, 3, unit), strict=True)]
    other = fresh(9)
    siblings = [np.concatenate([other, fresh(n)]) for n in (30, unit, 1)]
    groups = [[*calls, trunk, *side, trunk[: unit + 20], trunk], siblings]
    rollouts = []
    for group, words in enumerate(groups):
        for word in words:
            mask = rng.random(word.size) < 0.6
            mask[0], mask[-1] = False, True
            rollouts.append(Trajectory.of(word, loss_mask=mask, group_id=group))
    return rollouts
