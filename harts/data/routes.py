"""Recorded expert routes of a step: checks, and the keys that make tokens with different routes different tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harts.data.trajectory import Trajectory


def check_routes(i: int, trajectory: Trajectory) -> None:
    """Raise a ValueError that names trajectory `i` if its routes are no choice of experts for each of its tokens."""
    routes_LMA = trajectory.routes
    if routes_LMA is None:
        return
    if routes_LMA.ndim != 3 or routes_LMA.shape[0] != len(trajectory):
        raise ValueError(
            f"Trajectory {i} has {len(trajectory)} tokens but its routes have shape {routes_LMA.shape}, expected "
            f"({len(trajectory)}, layers, experts a token). Give -1 for tokens that were not recorded."
        )
    ascending_LMA = np.sort(routes_LMA, axis=-1)
    chosen_LM = ascending_LMA[..., 0] >= 0
    twice_LM = (ascending_LMA[..., 1:] == ascending_LMA[..., :-1]).any(-1)
    bad = np.argwhere(np.where(chosen_LM, twice_LM, (routes_LMA != -1).any(-1)))
    if bad.size:
        token, layer = bad[0].tolist()
        raise ValueError(
            f"Trajectory {i} has routes {routes_LMA[token, layer].tolist()} at token {token} and layer {layer}, "
            "expected different experts, or -1 throughout if none was recorded."
        )


def join_routes(trajectories: Sequence[Trajectory]) -> NDArray[np.int32] | None:
    """[F, M, A] int32, all trajectories one after the other; None if none has routes.

    Raises:
        ValueError: If only some have routes, or for other numbers of layers or experts.
    """
    routes = [t.routes for t in trajectories]
    missing = [i for i, r in enumerate(routes) if r is None]
    if len(missing) == len(routes):
        return None
    if missing:
        raise ValueError(
            f"Trajectory {missing[0]} has no routes but others of the step have. Give them for all trajectories or "
            "for none; -1 leaves tokens to the routers."
        )
    known = [r for r in routes if r is not None]
    other = next((i for i, r in enumerate(known) if r.shape[1:] != known[0].shape[1:]), None)
    if other is not None:
        raise ValueError(
            f"Trajectory {other} has routes of {known[other].shape[1]} layers and {known[other].shape[2]} experts, "
            f"but trajectory 0 of {known[0].shape[1]} and {known[0].shape[2]}. Record them from one model."
        )
    return np.concatenate(known)


def intern_routes(routes_FMA: NDArray[np.int32], share_key_F: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Number the distinct pairs of routes and share key, by comparing them, so that no two get one number.

    Args:
        routes_FMA: [F, M, A] int32.
        share_key_F: [F] int64, or None.

    Returns:
        [F] int64.

    Example:
        >>> routes = np.array([[[0, 1]], [[0, 2]], [[0, 1]]], dtype=np.int32)
        >>> intern_routes(routes, None).tolist(), intern_routes(routes, np.array([0, 0, 7])).tolist()
        ([0, 1, 0], [0, 2, 1])
    """
    rows = routes_FMA.reshape(routes_FMA.shape[0], -1)
    if share_key_F is not None:
        rows = np.concatenate([rows, share_key_F[:, None].view(np.int32)], axis=1)
    rows = np.ascontiguousarray(rows)
    _, number_F = np.unique(rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0], return_inverse=True)
    return number_F.astype(np.int64)
