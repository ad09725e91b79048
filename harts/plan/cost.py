"""Predicted work of prefix trees.

A token costs the same in every trajectory that contains it: projections, experts and linear attention cost a
constant, full attention a constant for each token it sees. So the work of a tree is a sum over paths, less the
shared prefixes, and needs only lengths and common prefixes. Replayed rows of linear attention are left out; they are
about one per cent of one part of the constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts.tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Work of a token at depth `d`, counted from 0: `flops_per_token + (d + 1) * flops_per_pair`.

    Example:
        >>> CostModel(flops_per_token=10.0, flops_per_pair=1.0).path_work(3).item()
        36.0
    """

    flops_per_token: float
    """FLOPs, >= 0, forward and backward. Everything that costs a token the same at any depth."""
    flops_per_pair: float
    """FLOPs, >= 0, forward and backward. Full attention of one token to one that it sees, itself included."""
    flops_per_microbatch: float = 0.0
    """FLOPs, >= 0. What a pass costs whatever it holds: launches, gathering parameters."""

    def __post_init__(self) -> None:
        for name, value in (("flops_per_token", self.flops_per_token), ("flops_per_pair", self.flops_per_pair)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Got {name} = {value}, expected a finite number >= 0.")

    @classmethod
    def of_model(
        cls, *, num_parameters: int, num_attention_layers: int, num_attention_heads: int, head_dim: int
    ) -> CostModel:
        """Count FLOPs from a model's dimensions.

        Args:
            num_parameters: Parameters that multiply every token: without embeddings, active experts only.
            num_attention_layers: Layers of full attention.
            num_attention_heads: Query heads of each.
            head_dim: Width of a head.

        Returns:
            Two FLOPs a multiply-add; the backward pass counts twice the forward pass.
        """
        return cls(
            flops_per_token=6.0 * num_parameters,
            flops_per_pair=12.0 * num_attention_layers * num_attention_heads * head_dim,
        )

    def path_work(self, length: ArrayLike) -> NDArray[np.float64]:
        """FLOPs of the first `length` tokens of a path, elementwise."""
        tokens = np.asarray(length, dtype=np.float64)
        return self.flops_per_token * tokens + self.flops_per_pair * (tokens * (tokens + 1) / 2)

    def work(self, length_N: NDArray[np.int64], lcp_N: NDArray[np.int64]) -> float:
        """FLOPs of some trajectories.

        Args:
            length_N: [N] int64. Tokens of each, in lexicographic order.
            lcp_N: [N] int64. Tokens shared with the one before, thus not computed again; zeros for flat execution.
        """
        # Rounded once at the end, so that all ranks get the same bits on any processor and in any order.
        return math.fsum((self.path_work(length_N) - self.path_work(lcp_N)).tolist())

    def tree_work(self, tree: PrefixTree) -> float:
        """FLOPs of a tree, each distinct token once."""
        return self.work(tree.length_N, tree.lcp_N)
