"""How evenly the tokens of a step went to the experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterStatistics:
    """What the routers did with the tokens of some trajectories, each token counted in every trajectory.

    Statistics of several microbatches, steps or ranks add up.

    Example:
        >>> a = RouterStatistics(layers=("l0",), load_MX=np.array([[3.0, 1.0]]), num_tokens=4.0)
        >>> (a + a).load_MX.tolist(), a.max_violation_M.tolist()
        ([[6.0, 2.0]], [0.5])
    """

    layers: tuple[str, ...]
    """Module names of the routers."""
    load_MX: NDArray[np.float64]
    """[M, X] float64. Tokens that each layer sent to each expert; A entries a token."""
    num_tokens: float
    """Tokens counted; those of a trajectory as often as its weight says, if weights count."""
    balance_loss: float = 0.0
    """The load-balancing loss, before its coefficient; what these tokens add to the step's."""
    z_loss: float = 0.0
    """The router z-loss, before its coefficient; what these tokens add to the step's."""

    def __add__(self, other: RouterStatistics) -> RouterStatistics:
        if self.layers != other.layers or self.load_MX.shape != other.load_MX.shape:
            raise ValueError(
                f"Got statistics of {len(self.layers)} layers and {self.load_MX.shape[1]} experts and of "
                f"{len(other.layers)} layers and {other.load_MX.shape[1]}, expected those of one model. "
                "Add up statistics of the same model only."
            )
        return RouterStatistics(
            layers=self.layers,
            load_MX=self.load_MX + other.load_MX,
            num_tokens=self.num_tokens + other.num_tokens,
            balance_loss=self.balance_loss + other.balance_loss,
            z_loss=self.z_loss + other.z_loss,
        )

    @property
    def max_violation_M(self) -> NDArray[np.float64]:
        """[M] float64. Largest load over mean load, minus 1; 0 if even (arXiv 2408.15664, section 4.1); NaN of none."""
        return self.load_MX.max(axis=1) / self.load_MX.mean(axis=1) - 1

    @property
    def entropy_M(self) -> NDArray[np.float64]:
        """[M] float64, nats. Entropy of the shares of the load; log X if even."""
        share_MX = self.load_MX / self.load_MX.sum(axis=1, keepdims=True)
        return -(share_MX * np.log(np.where(share_MX > 0, share_MX, 1.0))).sum(axis=1)
