"""What an objective sees: per-trajectory streams, restored. Nothing here knows about trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Normalization = Literal["token", "sequence", "group"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyStreams:
    """The trained tokens of some trajectories of a step, one trajectory after the other.

    All float tensors share one dtype (float32, or float64 where the model runs in it) and one device.
    """

    logprobs_P: Tensor
    """[P] float, with gradient. Log-probability of each trained token under the policy being trained."""
    entropy_P: Tensor | None
    """[P] float, with gradient, nats. Entropy of the distribution the token was drawn from; None unless the
    objective asks for it (`needs_entropy`)."""
    sampling_logprobs_P: Tensor | None
    """[P] float. Under the policy that sampled; never None where the objective `needs_sampling_logprobs`."""
    ref_logprobs_P: Tensor | None
    """[P] float. Under the reference policy; never None where the objective `needs_ref_logprobs`."""
    advantages_P: Tensor
    """[P] float."""
    loss_weight_P: Tensor
    """[P] float. The trajectory's weight over the normaliser of the whole step (see `normalization.py`), so that the
    loss of a step is the sum over its tokens, and over any split into microbatches, of `loss_weight * loss`."""
    trajectory_P: Tensor
    """[P] int64, ascending. Place of the token's trajectory among the `num_trajectories` here."""
    num_trajectories: int
    """Trajectories here, those without trained tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObjectiveOutput:
    """A microbatch's share of the step's loss and metrics; both add up over microbatches."""

    loss: Tensor
    """Scalar with gradient."""
    metrics: dict[str, Tensor]
    """Detached scalars, each a sum of `loss_weight * value` (so the step's sum is a weighted mean)."""


class Objective(Protocol):
    """Anything that turns restored streams into a loss."""

    @property
    def normalization(self) -> Normalization:
        """What the loss is a mean over: the step's tokens, sequences, or groups."""
        ...

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Whether trajectories must carry sampling log-probs."""
        ...

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether trajectories must carry reference log-probs."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether entropies are computed (they cost a pass over the logits)."""
        ...

    def __call__(self, streams: PolicyStreams) -> ObjectiveOutput:
        """The loss of these trajectories."""
        ...
