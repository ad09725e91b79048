"""Whether log-probs of the tree have the bits of each trajectory alone, in exact mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from harts.check.differences import differences
from harts.check.recording import one_by_one, one_tree, record
from harts.data import Trajectory, TrajectoryBatch
from harts.layout.kernels import Kernels
from harts.models import prepare
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
    logit_cosine: float
    """Smallest over the trained tokens of the cosine between logits."""
    first_layer_different: str | None
    """Name of the first layer that mixes tokens whose outputs differ in a bit; None if none does."""

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
    batch = TrajectoryBatch.of(trajectories)
    tree = build_prefix_tree(batch)
    plans = {"flat": one_by_one(batch), "tree": one_tree(tree)}
    recordings = {}
    with _eager_experts(model):
        prepared = prepare(model, kernels=Kernels(exact=True))
        try:
            for step in STEPS:
                progress(step)
                recordings[step] = record(prepared, trajectories, plans[step])
        finally:
            prepared.restore()
    actual, expected = recordings["tree"], recordings["flat"]
    different = int((actual.logprobs_P != expected.logprobs_P).sum())
    compared = differences(actual, expected, prepared, torch.from_numpy(batch.trained_P))
    return BitsReport(
        verdict="differs" if different else "bit-equal",
        dtype=str(model.dtype).removeprefix("torch."),
        tokens_flat=batch.token_ids_F.size,
        tokens_distinct=tree.num_tokens,
        tokens_trained=expected.logprobs_P.size,
        tokens_different=different,
        max_logprob_diff=compared.max_logprob,
        logit_cosine=compared.logit_cosine,
        first_layer_different=next((name for name, difference in compared.layers.items() if difference), None),
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
