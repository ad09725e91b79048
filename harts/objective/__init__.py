"""Restored per-trajectory streams in, the loss out.

Objectives know nothing about trees: a new one is a function of `PolicyStreams` (see `CustomObjective`).
"""

from harts.objective.custom import CustomObjective
from harts.objective.normalization import loss_weights
from harts.objective.policy_gradient import PolicyGradient, cispo, dapo, grpo, gspo, ppo
from harts.objective.requirements import check_streams
from harts.objective.streams import Normalization, Objective, ObjectiveOutput, PolicyStreams
from harts.objective.supervised import Supervised

__all__ = [
    "CustomObjective",
    "Normalization",
    "Objective",
    "ObjectiveOutput",
    "PolicyGradient",
    "PolicyStreams",
    "Supervised",
    "check_streams",
    "cispo",
    "dapo",
    "grpo",
    "gspo",
    "loss_weights",
    "ppo",
]
