"""Whether log-probs of the tree have the bits of each trajectory alone, in exact mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedModel

from harts.data import Trajectory, TrajectoryBatch
from harts.layout.kernels import Kernels
from harts.models import prepare
from harts.step import compute_logprobs
from harts.tree import build_prefix_tree

STEPS = ("flat", "tree")
"""What `check_bits` runs, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BitsReport:
    """What a check of bits found."""

    verdict: Literal["bit-equal", "differs"]
    """Whether all log-probs have equal bits."""
    dtype: str
    """Of the model."""
    tokens_flat: int
    """Of all trajectories."""
    tokens_distinct: int
    """That the tree computes."""
    tokens_trained: int
    """Log-probs compared."""
    tokens_different: int
    """Of these, how many differ in a bit."""
    max_logprob_diff: float
    """Largest absolute difference, nats."""

    @property
    def passed(self) -> bool:
        """Whether the check found nothing wrong."""
        return self.verdict == "bit-equal"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check_bits(
    model: PreTrainedModel, trajectories: Sequence[Trajectory], *, progress: Callable[[str], None] | None = None
) -> BitsReport:
    """Compute log-probs of tree and flat in exact mode and compare their bits. Slow.

    Args:
        model: Not prepared; left as it was. A mixture of experts runs with transformers' "eager" experts.
        trajectories: Some rollouts; all are computed as one tree.
        progress: Called with the name of each of `STEPS` before it runs.

    Raises:
        ValueError: If the model does not run on trees, or the trajectories do not fit it.
    """
    progress = progress or (lambda step: None)
    tree = build_prefix_tree(TrajectoryBatch.of(trajectories))
    logprobs = {}
    with _eager_experts(model):
        prepared = prepare(model, kernels=Kernels(exact=True))
        try:
            for step in STEPS:
                progress(step)
                logprobs[step] = compute_logprobs(
                    prepared,
                    trajectories,
                    execution="tree" if step == "tree" else "flat",
                    max_tokens_per_microbatch=tree.num_tokens,
                )
        finally:
            prepared.restore()
    different = int((logprobs["tree"] != logprobs["flat"]).sum())
    return BitsReport(
        verdict="differs" if different else "bit-equal",
        dtype=str(model.dtype).removeprefix("torch."),
        tokens_flat=int(tree.length_N.sum()),
        tokens_distinct=tree.num_tokens,
        tokens_trained=logprobs["flat"].size,
        tokens_different=different,
        max_logprob_diff=float(np.abs(logprobs["tree"] - logprobs["flat"]).max(initial=0.0)),
    )


@contextmanager
def _eager_experts(model: PreTrainedModel) -> Iterator[None]:
    """Bits of grouped products may depend on how many tokens each expert has."""
    before = model.get_experts_implementation()
    if before is not None:
        model.set_experts_implementation("eager")
    try:
        yield
    finally:
        if before is not None:
            model.set_experts_implementation(before)
