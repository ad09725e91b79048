from __future__ import annotations

import pytest

from harts.data import TrajectoryBatch
from harts.data.trajectory import example_trajectories
from harts.objective import CustomObjective, Objective, Supervised, check_streams, grpo, gspo


def batch_of(**streams: float) -> TrajectoryBatch:
    return TrajectoryBatch.of(example_trajectories(**streams))


MISSING = {
    "sampling": (gspo(), batch_of(), "GSPO needs sampling_logprobs.*when it is sampled"),
    "sampling, reference there": (grpo(), batch_of(ref_logprobs=-1.0), "GRPO needs sampling_logprobs"),
    "reference": (grpo(kl_coef=0.1), batch_of(sampling_logprobs=-1.0), "GRPO needs ref_logprobs.*kl_coef=0"),
    "custom sampling": (
        CustomObjective(lambda s: -s.logprobs_P, name="mine", needs_sampling_logprobs=True),
        batch_of(),
        "mine needs sampling_logprobs",
    ),
    "custom reference": (
        CustomObjective(lambda s: -s.logprobs_P, name="mine", needs_ref_logprobs=True),
        batch_of(),
        "mine needs ref_logprobs",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_stream_is_named(case: str):
    objective, batch, message = MISSING[case]
    with pytest.raises(ValueError, match=message):
        check_streams(objective, batch)


@pytest.mark.parametrize(
    ("objective", "batch"),
    [
        (Supervised(), batch_of()),
        (grpo(), batch_of(sampling_logprobs=-1.0)),
        (grpo(kl_coef=0.1), batch_of(sampling_logprobs=-1.0, ref_logprobs=-1.0)),
    ],
    ids=["supervised", "ratio", "ratio and penalty"],
)
def test_a_step_with_all_that_is_needed_passes(objective: Objective, batch: TrajectoryBatch):
    check_streams(objective, batch)
