"""Predicted work of prefix trees, and what each part of a microbatch costs.

A token costs the same in every trajectory that contains it: projections, experts and linear attention cost a
constant, full attention a constant for each token it sees. So the work of a tree is a sum over paths, less the
shared prefixes, and needs only lengths and common prefixes: that is `CostModel`, which planners read.
`CostParameters` names every part of a microbatch's time; `CostParameters.for_planner` folds those that do not follow
from depth (LM head, states) into the cost of a token. Replayed rows of linear attention are left out there unless
asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harts.plan.size import MicrobatchSize
from harts.tree import PrefixTree

TRAINING = 6.0
"""FLOPs of a multiply-add in training: two forward, four backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Work of a token at depth `d`, counted from 0: `flops_per_token + (d + 1) * flops_per_pair`.

    Layers with a window add `flops * min(d + 1, window)`. The unit is a FLOP where the costs are derived from a model
    and a second where they are fitted; planners compare them, nothing else.

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
    windows: tuple[tuple[int, float], ...] = ()
    """(tokens, FLOPs a pair) of attention that sees its last tokens only, the token itself included."""

    def __post_init__(self) -> None:
        values = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "windows"]
        values += [(f"windows[{i}]", value) for i, window in enumerate(self.windows) for value in window]
        for name, value in values:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Got {name} = {value}, expected a finite number >= 0.")

    @classmethod
    def of_model(
        cls, *, num_parameters: int, num_attention_layers: int, attention_width: int, windows: tuple[int, ...] = ()
    ) -> CostModel:
        """Count FLOPs from a model's dimensions.

        Args:
            num_parameters: Parameters that multiply every token: without embeddings, active experts only.
            num_attention_layers: Layers of full attention.
            attention_width: Query heads times head width, of each.
            windows: Tokens that each layer with sliding-window attention sees.

        Returns:
            Two FLOPs a multiply-add; the backward pass counts twice the forward pass.
        """
        pair = 2 * TRAINING * attention_width
        return cls(
            flops_per_token=TRAINING * num_parameters,
            flops_per_pair=pair * num_attention_layers,
            windows=tuple((window, pair) for window in windows),
        )

    def path_work(self, length: ArrayLike) -> NDArray[np.float64]:
        """FLOPs of the first `length` tokens of a path, elementwise."""
        tokens = np.asarray(length, dtype=np.float64)
        work = self.flops_per_token * tokens + self.flops_per_pair * (tokens * (tokens + 1) / 2)
        for window, flops in self.windows:
            inside = np.minimum(tokens, window)
            work = work + flops * (inside * (inside + 1) / 2 + (tokens - inside) * window)
        return work

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDimensions:
    """The numbers of a model's configuration that its cost follows from."""

    num_dense_parameters: int
    """Parameters that multiply every token: without embeddings, LM head and routed experts."""
    num_expert_parameters: int
    """Parameters of the routed experts that one token passes through; 0 without experts."""
    vocab_size: int
    """Rows of the LM head."""
    hidden_size: int
    """D."""
    num_layers: int
    """Decoder layers."""
    num_full_attention_layers: int
    """Layers of attention to all tokens before."""
    windows: tuple[int, ...]
    """Tokens that each layer with sliding-window attention sees; empty without such layers."""
    attention_width: int
    """Query heads times head width, of an attention layer."""
    num_linear_layers: int
    """Layers of chunked linear attention."""
    linear_heads: int
    """Value heads of such a layer; 0 without them."""
    linear_key_dim: int
    """Key width of such a head."""
    linear_value_dim: int
    """Value width of such a head."""
    chunk_size: int | None
    """C; None without linear attention."""
    saved_elements_per_token: int
    """Elements that autograd keeps for one token over all layers, without recomputation."""
    bytes_per_element: int
    """Of parameters and hidden states: 2 for bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostParameters:
    """What each part of a microbatch costs, forward and backward: FLOPs by `of_dimensions`, seconds once fitted.

    Example:
        >>> CostParameters(per_token=2.0, per_pair=1.0).predict(MicrobatchSize(tokens=3, pairs=6))
        12.0
    """

    per_token: float = 0.0
    """A computed token: projections, dense MLP, linear attention, short convolutions, norms."""
    per_expert_token: float = 0.0
    """A computed token's routed experts. Not told apart from `per_token` by a fit."""
    per_pair: float = 0.0
    """A token and one that it sees, in all layers of full attention."""
    per_window_pair: float = 0.0
    """A token and one that it sees, in one layer with a window."""
    per_loss_edge: float = 0.0
    """A row through the LM head, forward and twice backward since logits are recomputed."""
    per_run: float = 0.0
    """A run of linear attention: its states, and the padding of its last chunk."""
    per_round: float = 0.0
    """Waiting for the round before, in all layers of linear attention."""
    per_replayed: float = 0.0
    """A row of linear attention that repeats a token."""
    per_microbatch: float = 0.0
    """A pass, whatever it holds."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"Got {field.name} = {value}, expected a finite number >= 0.")

    @classmethod
    def of_dimensions(cls, model: ModelDimensions) -> CostParameters:
        """Count FLOPs; latencies and overheads have none, so they are 0 until they are measured."""
        chunk = model.chunk_size or 0
        # Chunk rule: two score matrices and the solve in a chunk, values by scores, state read and written.
        row = model.linear_heads * (
            chunk * (2 * model.linear_key_dim + 2 * model.linear_value_dim)
            + 2 * model.linear_key_dim * model.linear_value_dim
        )
        linear = TRAINING * model.num_linear_layers * row
        pair = 2 * TRAINING * model.attention_width
        return cls(
            per_token=TRAINING * model.num_dense_parameters + linear,
            per_expert_token=TRAINING * model.num_expert_parameters,
            per_pair=pair * model.num_full_attention_layers,
            per_window_pair=pair if model.windows else 0.0,
            # Logits are computed again in the backward pass: four matrix products instead of three.
            per_loss_edge=TRAINING * 4 / 3 * model.vocab_size * model.hidden_size,
            # Kernels compute whole chunks, so a run pays for half of one in the mean.
            per_run=linear * chunk / 2,
            per_replayed=linear,
        )

    def predict(self, size: MicrobatchSize) -> float:
        """Cost of one microbatch."""
        return math.fsum(
            (
                (self.per_token + self.per_expert_token) * size.tokens,
                self.per_pair * size.pairs,
                self.per_window_pair * size.window_pairs,
                self.per_loss_edge * size.loss_edges,
                self.per_run * size.runs,
                self.per_round * size.rounds,
                self.per_replayed * size.replayed,
                self.per_microbatch,
            )
        )

    def for_planner(
        self, step: MicrobatchSize, *, windows: tuple[int, ...] = (), with_replay: bool = False
    ) -> CostModel:
        """What planners read: costs by depth, with the LM head and the states spread over the step's tokens.

        Args:
            step: Size of the step as one tree; its loss edges, runs and replayed rows are spread.
            windows: As in `ModelDimensions`.
            with_replay: Whether to spread replayed rows too. They are reported, not planned for, otherwise.
        """
        spread = self.per_loss_edge * step.loss_edges + self.per_run * step.runs
        if with_replay:
            spread += self.per_replayed * step.replayed
        return CostModel(
            flops_per_token=self.per_token + self.per_expert_token + spread / max(step.tokens, 1),
            flops_per_pair=self.per_pair,
            # Every pass waits for at least one round.
            flops_per_microbatch=self.per_microbatch + self.per_round,
            windows=tuple((window, self.per_window_pair) for window in windows),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchMemory:
    """Bytes that live at the end of a microbatch's forward pass, parameters and optimiser not counted."""

    activations: int
    """Kept for the backward pass without recomputation."""
    activations_recomputed: int
    """With recomputation: the input of every layer, and one layer's own."""
    states: int
    """Final states of all runs of linear attention, float32."""
    logits: int
    """One chunk of logits, and what becomes of it in the backward pass, float32."""

    def total(self, *, recompute: bool) -> int:
        """Sum of the parts."""
        activations = self.activations_recomputed if recompute else self.activations
        return activations + self.states + self.logits


def microbatch_memory(
    model: ModelDimensions,
    size: MicrobatchSize,
    *,
    saved_bytes_per_token: float | None = None,
    logits_per_chunk: int = 2**25,
) -> MicrobatchMemory:
    """Estimate a microbatch's memory.

    Args:
        model: Of the model.
        size: Of the microbatch.
        saved_bytes_per_token: That autograd keeps without recomputation, if it was measured; counted from the model's
            dimensions otherwise, as kernels that fuse what they can would keep.
        logits_per_chunk: Elements of logits that exist at once, `LOGITS_PER_CHUNK` of harts.logprobs.
    """
    if saved_bytes_per_token is None:
        saved_bytes_per_token = model.saved_elements_per_token * model.bytes_per_element
    layer_inputs = model.num_layers * model.hidden_size * model.bytes_per_element
    kept = layer_inputs + saved_bytes_per_token / max(model.num_layers, 1)
    state = model.num_linear_layers * model.linear_heads * model.linear_key_dim * model.linear_value_dim
    logits = min(size.loss_edges * model.vocab_size, max(logits_per_chunk, model.vocab_size))
    return MicrobatchMemory(
        activations=round(size.tokens * saved_bytes_per_token),
        activations_recomputed=round(size.tokens * kept),
        states=size.runs * state * 4,
        # Log-probs, probabilities and the gradient of the logits.
        logits=3 * logits * 4,
    )
