"""All trajectories of one step, as columns.

The only place where trajectories are checked: every later stage may rely on the invariants documented on
`TrajectoryBatch`. Streams are kept for trained tokens only (`P`), since agent rollouts train a few per cent of
what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data.ragged import ranges
from harts.data.routes import check_routes, intern_routes, join_routes
from harts.data.trajectory import Trajectory

STREAMS = ("advantages", "sampling_logprobs", "ref_logprobs")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrajectoryBatch:
    """The trajectories of one step, one after the other.

    Example:
        >>> batch = TrajectoryBatch.of([Trajectory.of([1, 2, 3]), Trajectory.of([1, 2])])
        >>> batch.offsets.tolist(), batch.trained_P.tolist()
        ([0, 3, 5], [1, 2, 4])
    """

    token_ids_F: NDArray[np.int64]
    """[F] int64. Token ids of all trajectories, one after the other; none negative."""
    offsets: NDArray[np.int64]
    """[N + 1] int64. Trajectory `i` is `token_ids_F[offsets[i]:offsets[i + 1]]`; at least one token each."""
    share_key_F: NDArray[np.int64] | None
    """[F] int64, or None if no trajectory has one. Tokens with different routes have different ones."""
    routes_FMA: NDArray[np.int32] | None
    """[F, M, A] int32. Recorded experts, -1 where none were; None if no trajectory has routes."""
    trained_P: NDArray[np.int64]
    """[P] int64, ascending. Flat index of every trained token; never the first token of a trajectory."""
    trajectory_P: NDArray[np.int64]
    """[P] int64. Trajectory of every trained token."""
    advantages_P: NDArray[np.float64]
    """[P] float64, finite."""
    sampling_logprobs_P: NDArray[np.float64] | None
    """[P] float64, finite, <= 0 up to rounding; None if no trajectory has them."""
    ref_logprobs_P: NDArray[np.float64] | None
    """[P] float64, as above."""
    group_N: NDArray[np.int64]
    """[N] int64. Group ids as given."""
    temperature_N: NDArray[np.float64]
    """[N] float64, > 0."""
    weight_N: NDArray[np.float64]
    """[N] float64, >= 0."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """Check the trajectories and lay them out as columns.

        Args:
            trajectories: At least one, each with at least one token; order is kept.

        Raises:
            ValueError: If there is none, or one is empty, has a stream of the wrong length, a trained first
                token, a negative id, a NaN or infinite number, or lacks a stream that others have.
        """
        if len(trajectories) == 0:
            raise ValueError("Got no trajectories, expected at least one. Skip the step if no rollout came back.")
        for i, trajectory in enumerate(trajectories):
            check_trajectory(trajectory, number=i)
        lengths = np.array([len(t) for t in trajectories], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        mask_F = np.concatenate([t.loss_mask for t in trajectories])
        has_key = any(t.share_key is not None for t in trajectories)
        share_key_F = np.concatenate([_key(t) for t in trajectories]) if has_key else None
        routes_FMA = join_routes(trajectories)
        return cls(
            token_ids_F=np.concatenate([t.token_ids for t in trajectories]),
            offsets=offsets,
            share_key_F=share_key_F if routes_FMA is None else intern_routes(routes_FMA, share_key_F),
            routes_FMA=routes_FMA,
            trained_P=np.flatnonzero(mask_F),
            trajectory_P=np.repeat(np.arange(len(trajectories)), lengths)[mask_F],
            **{f"{name}_P": _column(name, trajectories) for name in STREAMS},  # type: ignore[arg-type]
            group_N=np.array([t.group_id for t in trajectories], dtype=np.int64),
            temperature_N=np.array([t.temperature for t in trajectories], dtype=np.float64),
            weight_N=np.array([t.weight for t in trajectories], dtype=np.float64),
        )

    @property
    def num_trajectories(self) -> int:
        """N."""
        return self.offsets.size - 1

    @property
    def length_N(self) -> NDArray[np.int64]:
        """[N] int64. Tokens of each trajectory."""
        return np.diff(self.offsets)

    def policy_tokens(self, trajectories: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into the `P` columns of the trained tokens of some trajectories, in the order given.

        Args:
            trajectories: [n] int64, trajectory numbers.

        Returns:
            int64 indices, trajectory by trajectory, ascending within each.
        """
        begin = np.searchsorted(self.trajectory_P, trajectories, side="left")
        counts = np.searchsorted(self.trajectory_P, trajectories, side="right") - begin
        return ranges(begin, counts)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a ValueError that names the first trajectory with an id outside `0 <= id < vocab_size`."""
        bad_F = np.flatnonzero(self.token_ids_F >= vocab_size)
        if bad_F.size:
            i = int(np.searchsorted(self.offsets, bad_F[0], side="right")) - 1
            raise ValueError(
                f"Trajectory {i} has token id {self.token_ids_F[bad_F[0]]} at position {bad_F[0] - self.offsets[i]}, "
                f"but the model's vocabulary has {vocab_size} entries. "
                "Use the tokenizer that belongs to the model, or resize its embeddings."
            )


def check_trajectory(trajectory: Trajectory, *, number: int = 0) -> None:
    """Check one trajectory by itself, as `TrajectoryBatch.of` does.

    Args:
        trajectory: What to check.
        number: For messages.

    Raises:
        ValueError: Naming the trajectory by its number.
    """
    i, length = number, len(trajectory)
    if length == 0:
        raise ValueError(f"Trajectory {i} has no tokens, expected at least one. Remove it before the step.")
    if trajectory.token_ids.min() < 0:
        raise ValueError(
            f"Trajectory {i} has the negative token id {trajectory.token_ids.min()}, expected ids >= 0. "
            "Remove padding before the step; HARTS needs none."
        )
    for name in ("loss_mask", "share_key", *STREAMS):
        stream = getattr(trajectory, name)
        if stream is not None and stream.shape != (length,):
            raise ValueError(
                f"Trajectory {i} has {length} tokens but its {name} has shape {stream.shape}, "
                f"expected ({length},). Give one entry a token."
            )
    check_routes(i, trajectory)
    if trajectory.loss_mask[0]:
        raise ValueError(f"Trajectory {i} trains its first token, which nothing predicts. Set loss_mask[0] to False.")
    for name in STREAMS:
        stream = getattr(trajectory, name)
        # Outside the mask rollout engines leave NaN where nothing was sampled; nothing reads those.
        if stream is not None and not np.isfinite(stream[trajectory.loss_mask]).all():
            at = np.flatnonzero(trajectory.loss_mask & ~np.isfinite(stream))[0]
            raise ValueError(
                f"Trajectory {i} has {name}[{at}] = {stream[at]} at a trained token, expected a finite number. "
                "Mask that token or repair the stream."
            )
    if not (np.isfinite(trajectory.temperature) and trajectory.temperature > 0):
        raise ValueError(
            f"Trajectory {i} has temperature {trajectory.temperature}, expected a finite number > 0. "
            "For greedy rollouts use 1."
        )
    if not (np.isfinite(trajectory.weight) and trajectory.weight >= 0):
        raise ValueError(
            f"Trajectory {i} has weight {trajectory.weight}, expected a finite number >= 0. "
            "To take a trajectory out of the loss, give it weight 0."
        )


def _key(trajectory: Trajectory) -> NDArray[np.int64]:
    return np.zeros(len(trajectory), dtype=np.int64) if trajectory.share_key is None else trajectory.share_key


def _column(name: str, trajectories: Sequence[Trajectory]) -> NDArray[np.float64] | None:
    streams = [getattr(t, name) for t in trajectories]
    missing = [i for i, stream in enumerate(streams) if stream is None]
    if len(missing) == len(streams):
        return None
    if missing:
        raise ValueError(
            f"Trajectory {missing[0]} has no {name} but others of the step have. "
            "Give them for all trajectories or for none."
        )
    return np.concatenate([stream[t.loss_mask] for stream, t in zip(streams, trajectories, strict=True)])
