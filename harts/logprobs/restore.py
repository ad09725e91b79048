"""From loss edges back to trajectories: one gather, whose gradient sums over the trajectories that share an edge."""

from __future__ import annotations

from torch import Tensor

from harts.layers.gather import gather_rows


def restore(values_E: Tensor, edge_P: Tensor) -> Tensor:
    """[P] the value of each trained token's edge, trajectory after trajectory."""
    return gather_rows(values_E, edge_P)
