"""An objective from a user's own function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from harts.objective.normalization import check_normalization
from harts.objective.streams import Normalization, ObjectiveOutput, PolicyStreams


@dataclass(frozen=True, kw_only=True, slots=True)
class CustomObjective:
    """The loss that a function gives each trained token.

    The function must treat every trajectory on its own: which of them it sees together depends on the plan.
    Metrics: `policy_loss`, which is the loss.

    Example:
        >>> reinforce = CustomObjective(lambda streams: -streams.advantages_P * streams.logprobs_P)
        >>> reinforce.needs_sampling_logprobs
        False
    """

    fn: Callable[[PolicyStreams], Tensor] = field(kw_only=False)
    """From the streams to the loss of each token, [P] float, before loss weights, differentiable in the log-probs."""
    name: str = "CustomObjective"
    """What messages call it."""
    normalization: Normalization = "token"
    """What the loss is a mean over."""
    needs_sampling_logprobs: bool = False
    """Whether the function reads `sampling_logprobs_P`."""
    needs_ref_logprobs: bool = False
    """Whether the function reads `ref_logprobs_P`."""
    needs_entropy: bool = False
    """Whether the function reads `entropy_P`."""

    def __post_init__(self) -> None:
        check_normalization(self.normalization)

    def __str__(self) -> str:
        return self.name

    def __call__(self, streams: PolicyStreams) -> ObjectiveOutput:
        """The loss of these trajectories.

        Raises:
            ValueError: If the function returns something else than a differentiable loss for each token.
        """
        loss_P = self.fn(streams)
        expected = tuple(streams.logprobs_P.shape)
        if not isinstance(loss_P, Tensor) or tuple(loss_P.shape) != expected:
            got = f"shape {tuple(loss_P.shape)}" if isinstance(loss_P, Tensor) else f"a {type(loss_P).__name__}"
            raise ValueError(
                f"{self} returned {got}, expected a tensor of shape {expected}: the loss of each trained token. "
                "Leave sums and means to the normalization."
            )
        if streams.logprobs_P.requires_grad and not loss_P.requires_grad:
            raise ValueError(
                f"{self} returned a loss without gradient, expected one that depends on streams.logprobs_P or "
                "streams.entropy_P. Do not detach these, and do not compute the loss under no_grad."
            )
        loss = (streams.loss_weight_P * loss_P).sum()
        return ObjectiveOutput(loss=loss, metrics={"policy_loss": loss.detach()})
