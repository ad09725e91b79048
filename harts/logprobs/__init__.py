"""Hidden states in, the log-probs of every trajectory out; full logits never exist."""

from harts.logprobs.linear_cross_entropy import linear_logprobs
from harts.logprobs.restore import restore

__all__ = ["linear_logprobs", "restore"]
