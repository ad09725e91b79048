"""Every rank makes the plan for itself; before the first collective of the step they compare what they made."""

from __future__ import annotations

import numpy as np

from harts.data.exchange import Exchange
from harts.plan.plan import Plan


def check_agreement(plan: Plan, exchange: Exchange) -> None:
    """Raise on every rank if the plans of the ranks differ.

    One reduction of 64 bytes, for any number of ranks: the largest digest and the largest complement of a digest over
    ranks, which are complements of each other exactly if all digests are equal. Only where they differ are the digests
    gathered, 32 bytes a rank, to name the ranks.

    Args:
        plan: This rank's.
        exchange: With the others.

    Raises:
        ValueError: If the plans differ, or are not made for as many ranks as there are.
    """
    digest = np.frombuffer(bytes.fromhex(plan.digest), dtype="<i8").astype(np.int64)
    largest, complement = np.split(exchange.maximum(np.concatenate([digest, ~digest])), 2)
    if (largest != ~complement).any():
        all_digests = exchange.all_gather(digest, [digest.size] * exchange.ranks)
        ranks_by_digest: dict[str, list[int]] = {}
        for rank, other in enumerate(all_digests):
            ranks_by_digest.setdefault(other.astype("<i8").tobytes().hex()[:12], []).append(rank)
        made = "; ".join(f"{name} on {_named(ranks)}" for name, ranks in ranks_by_digest.items())
        raise ValueError(
            f"Ranks made {len(ranks_by_digest)} different plans: {made}. Plan on every rank from the same tree, limit, "
            "costs and seed."
        )
    if plan.ranks != exchange.ranks:
        raise ValueError(f"The plan is for {plan.ranks} ranks, but {exchange.ranks} run. Plan for as many as run.")


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown} and {len(ranks) - 8} more" if len(ranks) > 8 else f"ranks {shown}"
