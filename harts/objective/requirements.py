"""Whether a step carries the log-probs that its objective reads."""

from __future__ import annotations

from harts.data import TrajectoryBatch
from harts.objective.streams import Objective


def check_streams(objective: Objective, batch: TrajectoryBatch) -> None:
    """Refuse a step that lacks a stream which the objective needs.

    Args:
        objective: Anything that implements `Objective`.
        batch: All trajectories of the step.

    Raises:
        ValueError: Naming the objective, the missing stream, and what to record or change.
    """
    if objective.needs_sampling_logprobs and batch.sampling_logprobs_P is None:
        raise ValueError(
            f"{objective} needs sampling_logprobs, but no trajectory has them. Record the log-prob of every token "
            "when it is sampled, or compute them with harts.step.compute_logprobs before the first update, and pass "
            "them to Trajectory.of(..., sampling_logprobs=...); or choose an objective without an importance ratio."
        )
    if objective.needs_ref_logprobs and batch.ref_logprobs_P is None:
        raise ValueError(
            f"{objective} needs ref_logprobs, but no trajectory has them. Compute them with "
            "harts.step.compute_logprobs under the reference model and pass them to Trajectory.of(..., "
            "ref_logprobs=...); or set kl_coef=0 to leave out the KL penalty."
        )
