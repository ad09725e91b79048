"""One training sample: flat token ids and the streams aligned with them.

A trajectory is what the policy saw and wrote in one sample, in order, as the rollout engine tokenised it.
Nothing here knows about trees: sharing is found later, from the token ids alone. Checks that need to name a
trajectory by its place in the step live in `batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """A token sequence with its per-token training streams.

    Streams are indexed by the token they speak of: `sampling_logprobs[t]` is the log-probability of
    `token_ids[t]` given the tokens before it, and `loss_mask[t]` says whether that log-probability is trained.

    Example:
        >>> turn = Trajectory.of([5, 6, 7, 8], loss_mask=[0, 0, 1, 1], advantages=0.5)
        >>> turn.advantages.tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    token_ids: NDArray[np.int64]
    """[L] int64, 0 <= id < vocabulary size."""
    loss_mask: NDArray[np.bool_]
    """[L] bool. Tokens that are trained. The first token has no predictor, so its entry must be False."""
    advantages: NDArray[np.float64]
    """[L] float64, finite. Read where `loss_mask` is True only."""
    sampling_logprobs: NDArray[np.float64] | None = None
    """[L] float64, log-probabilities under the policy that sampled; None where the objective needs none."""
    ref_logprobs: NDArray[np.float64] | None = None
    """[L] float64, log-probabilities under the reference policy of a KL penalty; None for no such penalty."""
    share_key: NDArray[np.int64] | None = None
    """[L] int64. Anything besides id and position that changes the forward pass of a token (recorded expert
    routes, image hashes, adapter ids). Tokens share computation only where keys are equal; None counts as 0."""
    routes: NDArray[np.int32] | None = None
    """[L, M, A] int32. Experts that each router (M, in the order of the layers) sent each token to, as recorded; the
    forward pass follows them. -1 throughout a token and layer leaves it to the router; None leaves all. Part of what
    tokens must agree in to share computation."""
    group_id: int = 0
    """Trajectories of one prompt carry one group id; group normalisation reads it. It never affects sharing."""
    temperature: float = 1.0
    """> 0. Log-probabilities are those of softmax(logits / temperature)."""
    weight: float = 1.0
    """>= 0. A trajectory of weight 2 counts as two copies of it."""

    @classmethod
    def of(
        cls,
        token_ids: ArrayLike,
        *,
        loss_mask: ArrayLike | None = None,
        advantages: ArrayLike = 0.0,
        sampling_logprobs: ArrayLike | None = None,
        ref_logprobs: ArrayLike | None = None,
        **fields: object,
    ) -> Trajectory:
        """Build a trajectory from lists, arrays or tensors.

        Args:
            token_ids: [L] integers.
            loss_mask: [L] bool or 0/1. None trains every token but the first.
            advantages: A number for all tokens, or [L].
            sampling_logprobs: [L] or None.
            ref_logprobs: [L] or None.
            **fields: `share_key`, `routes`, `group_id`, `temperature`, `weight`, as documented on the class.

        Returns:
            The trajectory, with every stream converted to the dtypes documented on the class.
        """
        ids = np.asarray(token_ids)
        if ids.size and ids.dtype.kind not in "iu":
            raise ValueError(
                f"token_ids are {ids.dtype}, expected integers. Convert the ids before building the trajectory."
            )
        mask = np.arange(ids.size) > 0 if loss_mask is None else np.asarray(loss_mask).astype(bool)
        share_key, routes = fields.pop("share_key", None), fields.pop("routes", None)
        return cls(
            token_ids=ids.astype(np.int64).reshape(-1),
            loss_mask=mask,
            advantages=_stream(advantages, ids.size),
            sampling_logprobs=None if sampling_logprobs is None else _stream(sampling_logprobs, ids.size),
            ref_logprobs=None if ref_logprobs is None else _stream(ref_logprobs, ids.size),
            share_key=None if share_key is None else np.asarray(share_key, dtype=np.int64),
            routes=None if routes is None else np.asarray(routes).astype(np.int32),
            **fields,  # type: ignore[arg-type]
        )

    def __len__(self) -> int:
        return self.token_ids.size


def _stream(values: ArrayLike, length: int) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return np.full(length, float(array)) if array.ndim == 0 else array


def example_trajectories(**fields: object) -> Sequence[Trajectory]:
    """The project's worked example: `abcde`, `abxy`, `abcz`, `abc`; 16 tokens, 8 distinct in the tree."""
    letters = {letter: index for index, letter in enumerate("abcdexyz")}
    return [Trajectory.of([letters[c] for c in word], **fields) for word in ("abcde", "abxy", "abcz", "abc")]  # type: ignore[arg-type]
