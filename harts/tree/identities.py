"""What makes tokens the same, as numbers that mean the same on every rank.

Within a rank a token is its id and a class, a number that this rank gave to the token's share key and recorded routes
(`harts/data/routes.py`). Other ranks number their own keys, so what travels is the key itself: a row of integers that
sorts as the classes of one process would. The position is implied: it is the depth of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data import Trajectory, TrajectoryBatch
from harts.data.routes import join_routes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenIdentities:
    """The tokens of one rank's trajectories; there may be none.

    Example:
        >>> TokenIdentities.of([Trajectory.of([1, 2, 3]), Trajectory.of([1, 2])]).offsets.tolist()
        [0, 3, 5]
    """

    token_ids_F: NDArray[np.int64]
    """[F] int64, >= 0. Token ids of all trajectories, one after the other."""
    offsets: NDArray[np.int64]
    """[N + 1] int64. Trajectory `i` is `token_ids_F[offsets[i]:offsets[i + 1]]`; may be empty."""
    class_F: NDArray[np.int64] | None = None
    """[F] int64. Equal where all of the key is, in the order of the keys; None where no token has a key."""
    share_key_F: NDArray[np.int64] | None = None
    """[F] int64, as given by the caller; None counts as 0."""
    routes_FMA: NDArray[np.int32] | None = None
    """[F, M, A] int32. Recorded experts."""

    @classmethod
    def of(
        cls, trajectories: Sequence[Trajectory], *, check: Callable[[TrajectoryBatch], None] | None = None
    ) -> TokenIdentities:
        """Check some trajectories, as `TrajectoryBatch.of` does, and lay out their tokens.

        Args:
            trajectories: May be none.
            check: What else is asked of them, if there are any: raises a ValueError.
        """
        if len(trajectories) == 0:
            return cls(token_ids_F=np.zeros(0, dtype=np.int64), offsets=np.zeros(1, dtype=np.int64))
        batch = TrajectoryBatch.of(trajectories)
        if check is not None:
            check(batch)
        has_key = any(t.share_key is not None for t in trajectories)
        keys = [np.zeros(len(t), dtype=np.int64) if t.share_key is None else t.share_key for t in trajectories]
        return cls(
            token_ids_F=batch.token_ids_F,
            offsets=batch.offsets,
            class_F=batch.share_key_F,
            share_key_F=np.concatenate(keys) if has_key else None,
            routes_FMA=join_routes(trajectories),
        )

    @property
    def length_N(self) -> NDArray[np.int64]:
        """[N] int64. Tokens of each trajectory."""
        return np.diff(self.offsets)


FACTS = 6
"""Numbers in `local_facts`."""


def local_facts(identities: TokenIdentities) -> NDArray[np.int64]:
    """What the other ranks must know to agree on rows: trajectories, largest id, layers and experts of the routes,
    least and largest share key."""
    shape = (-1, -1) if identities.routes_FMA is None else identities.routes_FMA.shape[1:]
    key_F = np.zeros(1, dtype=np.int64) if identities.share_key_F is None else identities.share_key_F
    bounds = (key_F.min(), key_F.max()) if key_F.size else (0, 0)
    largest = identities.token_ids_F.max(initial=-1)
    return np.array([identities.offsets.size - 1, largest, *shape, *bounds], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFormat:
    """How all ranks write down what makes a token."""

    num_routes: int
    """Experts of a token, all layers together; 0 without routes."""
    with_share_key: bool
    """Whether share keys tell any tokens apart."""
    is_narrow: bool
    """Whether 32 bits hold a row's entries: there is no key, and no larger id."""

    @classmethod
    def of(cls, facts: NDArray[np.int64]) -> RowFormat:
        """Agree on a format.

        Args:
            facts: [ranks, FACTS] int64, the `local_facts` of every rank.

        Raises:
            ValueError: If some ranks recorded routes and others did not, or of another model.
        """
        ranks = np.flatnonzero(facts[:, 0] > 0)
        shapes = facts[ranks, 2:4]
        other = np.flatnonzero((shapes != shapes[:1]).any(axis=1))
        if other.size:
            one, two = shapes[0].tolist(), shapes[other[0]].tolist()
            raise ValueError(
                f"Routes have {one} layers and experts on rank {ranks[0]}, but {two} on rank {ranks[other[0]]} (-1: "
                "there are none). Record them from one model, for all trajectories of the step or for none."
            )
        # A key that never changes tells nothing apart.
        with_share_key = ranks.size > 0 and facts[ranks, 4].min() != facts[ranks, 5].max()
        num_routes = max(0, int(shapes[0].prod())) if ranks.size and shapes[0, 0] >= 0 else 0
        largest = int(facts[:, 1].max())
        is_narrow = not (with_share_key or num_routes) and largest < 2**31
        return cls(num_routes=num_routes, with_share_key=bool(with_share_key), is_narrow=is_narrow)

    @property
    def num_columns(self) -> int:
        """Integers of a row: the token id, then the key."""
        if self.num_routes:
            return 1 + -(-self.num_routes // 2) + self.with_share_key
        return 1 + self.with_share_key

    @property
    def dtype(self) -> np.dtype:
        """Of a row's integers."""
        return np.dtype(np.int32 if self.is_narrow else np.int64)

    def rows(self, identities: TokenIdentities, place_T: NDArray[np.int64]) -> NDArray[np.integer]:
        """Write down some tokens.

        Args:
            identities: Of this rank.
            place_T: [T] int64, flat indices of tokens.

        Returns:
            [T * num_columns]. Rows compare, integer by integer, as tokens do in the tree of one process: by id, then
            by share key or, where routes were recorded, by the bytes of the routes and the share key.
        """
        token_T = identities.token_ids_F[place_T].astype(self.dtype, copy=False)
        if self.num_columns == 1:
            return token_T
        key_F = identities.share_key_F
        key_T = np.zeros(place_T.size, dtype=np.int64) if key_F is None else key_F[place_T]
        if not self.num_routes:
            return np.stack([token_T, key_T], axis=1).reshape(-1)
        assert identities.routes_FMA is not None or place_T.size == 0
        bytes_T = np.zeros((place_T.size, 2 * (self.num_columns - 1)), dtype=np.int32)
        if identities.routes_FMA is not None:
            bytes_T[:, : self.num_routes] = identities.routes_FMA[place_T].reshape(place_T.size, self.num_routes)
        if self.with_share_key:
            bytes_T[:, self.num_routes : self.num_routes + 2] = key_T[:, None].view(np.int32)
        # Unsigned integers with the first byte most significant compare as bytes do; the sign bit makes them signed.
        unsigned = bytes_T.view(">u8").astype(np.uint64) ^ np.uint64(1 << 63)
        return np.concatenate([token_T[:, None], unsigned.view(np.int64)], axis=1).reshape(-1)
