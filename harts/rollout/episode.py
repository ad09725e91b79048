"""What playing one game leaves behind: a dialogue's ids and where the policy wrote them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Episode:
    """A finished game. Turn `i` is one call of the policy: it read everything before its action and wrote that."""

    token_ids: NDArray[np.int64]
    """[L] int64. The whole dialogue, up to the last action."""
    sampling_logprobs: NDArray[np.float64]
    """[L] float64. Log-probability of every sampled token when it was sampled; 0 elsewhere."""
    action_begin: NDArray[np.int64]
    """[turns] int64, ascending. First token of each action."""
    action_end: NDArray[np.int64]
    """[turns] int64. One past the last token of each action, greater than its begin; the last equals L."""
    group_id: int
    """Number of the game's seed within the batch: episodes of one game are siblings."""
    reward: float
    """The game's reward."""

    @property
    def num_turns(self) -> int:
        """Calls of the policy."""
        return self.action_begin.size
