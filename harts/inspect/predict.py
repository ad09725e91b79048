"""What a model's step would cost on the tree of one group and flat, and what memory it would take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harts.plan.cost import ModelDimensions, microbatch_memory
from harts.plan.sharing import ExecutionCosts
from harts.plan.size import size_of_flat, size_of_tree
from harts.tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """What predictions need to know of a model."""

    name: str
    """As the user called it."""
    dimensions: ModelDimensions
    """Of its configuration."""
    costs: ExecutionCosts
    """Of both executions: FLOPs, or seconds if they were calibrated."""
    saved_bytes_per_token: float | None
    """That autograd was measured to keep; None if the model was not calibrated."""

    @property
    def fitted(self) -> bool:
        """Whether costs were calibrated."""
        return self.saved_bytes_per_token is not None

    def in_words(self, cost: float) -> str:
        """A cost with its unit."""
        if not self.fitted:
            return f"{cost / 1e15:.4g} PFLOP"
        return f"{cost:.3f} s" if cost >= 1 else f"{cost * 1e3:.2f} ms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A group as one microbatch."""

    shared: float
    """Cost on the tree: FLOPs, or seconds with calibrated costs."""
    flat: float
    """Cost of its trajectories one by one, padding not counted, in the same unit."""
    memory: int
    """Bytes that live at the end of the tree's forward pass, parameters and optimiser not counted."""
    memory_recomputed: int
    """The same with activation checkpointing."""

    @property
    def speedup(self) -> float:
        """Cost flat over cost on the tree."""
        return self.flat / self.shared if self.shared else math.inf


def predict(tree: PrefixTree, model: ModelCosts, *, loss_edges: tuple[int, int]) -> Prediction:
    """Predict cost and memory of a group.

    Args:
        tree: Of the group.
        model: Its costs.
        loss_edges: Trained tokens, distinct and in all.
    """
    costs = model.costs
    distinct, every = loss_edges
    shared = size_of_tree(tree, chunk_size=costs.chunk_size, windows=costs.windows, loss_edges=distinct)
    flat = size_of_flat(
        tree.length_N, has_linear_attention=costs.chunk_size is not None, windows=costs.windows, loss_edges=every
    )
    memory = microbatch_memory(model.dimensions, shared, saved_bytes_per_token=model.saved_bytes_per_token)
    return Prediction(
        shared=costs.tree.predict(shared),
        flat=costs.flat.predict(flat),
        memory=memory.total(recompute=False),
        memory_recomputed=memory.total(recompute=True),
    )
