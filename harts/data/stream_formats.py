"""How the streams of a step travel: in the fewest bytes that bring back every value to the bit.

Streams are float64 wherever they are computed with, but most come from float32 log-probs, and many advantages are one
number for a whole trajectory. Ranks say what theirs need, and all send what the neediest does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data.ragged import split

FACTS = 3
"""Numbers in `stream_facts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFormat:
    """Of one stream, on all ranks."""

    is_sent: bool
    """Whether any value is not zero, or it must be told from a stream that is missing."""
    varies: bool
    """Whether a value of each trained token is sent, or one of each trajectory, where all its tokens have the same."""
    is_wide: bool
    """Whether as float64, or as float32, which holds every value exactly."""

    @classmethod
    def of(cls, facts: NDArray[np.int64]) -> StreamFormat:
        """Agree on a format, given `[ranks, FACTS]`, the `stream_facts` of every rank."""
        is_sent, varies, is_wide = facts.max(axis=0).astype(bool).tolist()
        return cls(is_sent=is_sent, varies=varies, is_wide=is_wide)

    @property
    def dtype(self) -> type[np.floating]:
        """Of what is sent."""
        return np.float64 if self.is_wide else np.float32

    def sizes(self, count_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries that are sent of trajectories with so many trained tokens."""
        return self.is_sent * (count_N if self.varies else np.ones_like(count_N))

    def write(self, values: Sequence[NDArray[np.floating]]) -> NDArray[np.floating]:
        """What is sent of some trajectories, given the values of the trained tokens of each."""
        kept = values if self.varies else [np.append(some, 0.0)[:1] for some in values]
        return np.concatenate(kept).astype(self.dtype)

    def read(self, sent: NDArray[np.floating], count_N: NDArray[np.int64]) -> list[NDArray[np.floating]]:
        """The values of each trajectory, or a single one that all its trained tokens have."""
        return split(sent, self.sizes(count_N))


def stream_facts(values: Sequence[NDArray[np.floating]], *, even_zeros: bool = False) -> NDArray[np.int64]:
    """What a rank's values of one stream need.

    Args:
        values: Of the trained tokens of each trajectory; none if the stream is missing.
        even_zeros: Whether a stream of zeros is sent, because it is not the same as none.

    Example:
        >>> stream_facts([np.array([0.5, 0.5]), np.array([0.25])]).tolist()
        [1, 0, 0]
        >>> stream_facts([np.array([0.5, 0.1])]).tolist()
        [1, 1, 1]
    """
    bits = [np.ascontiguousarray(some, dtype=np.float64).view(np.int64) for some in values]
    is_sent = bool(bits) if even_zeros else any(some.any() for some in bits)
    varies = any((some != some[:1]).any() for some in bits)
    return np.array([is_sent, varies, any(needs_float64(some) for some in values)], dtype=np.int64)


def needs_float64(values: NDArray[np.floating]) -> bool:
    """Whether float32 would change a bit of any value."""
    wide = np.ascontiguousarray(values, dtype=np.float64)
    with np.errstate(over="ignore"):  # what becomes infinite has changed
        back = wide.astype(np.float32).astype(np.float64)
    return bool((back.view(np.int64) != wide.view(np.int64)).any())
