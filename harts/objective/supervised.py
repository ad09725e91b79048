"""Maximum likelihood of the trained tokens: supervised fine-tuning, behaviour cloning."""

from __future__ import annotations

from dataclasses import dataclass

from harts.objective.normalization import check_normalization
from harts.objective.streams import Normalization, ObjectiveOutput, PolicyStreams


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """The negative log-probability of the trained tokens. Advantages are not read.

    Metrics: `policy_loss`, which is the loss.
    """

    normalization: Normalization = "token"
    """What the loss is a mean over."""

    def __post_init__(self) -> None:
        check_normalization(self.normalization)

    def __str__(self) -> str:
        return "Supervised"

    @property
    def needs_sampling_logprobs(self) -> bool:
        """Never."""
        return False

    @property
    def needs_ref_logprobs(self) -> bool:
        """Never."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """Never."""
        return False

    def __call__(self, streams: PolicyStreams) -> ObjectiveOutput:
        """The loss of these trajectories."""
        loss = -(streams.loss_weight_P * streams.logprobs_P).sum()
        return ObjectiveOutput(loss=loss, metrics={"policy_loss": loss.detach()})
