"""HARTS: agentic RL on rollout trees, each shared token computed once, exact.

    rollouts -> data -> trajectories -> tree -> prefix tree -> plan -> microbatches -> layout -> packed layout
    packed layout -> layers, models -> hidden states -> logprobs -> log-probs -> objective -> loss -> train -> gradients

`harts/step.py` runs the stages in this order and is the first file to read.

Example:
    >>> import harts
    >>> trajectories = [harts.Trajectory.of([1, 2, 3, 4]), harts.Trajectory.of([1, 2, 5])]
    >>> model = harts.prepare(hf_model)  # doctest: +SKIP
    >>> harts.train_step(model, trajectories, harts.grpo())  # doctest: +SKIP
"""

from harts.check import CheckReport, check_model
from harts.data import RolloutGroup, Trajectory
from harts.data.readers import GroupShape, SkippedLines, read
from harts.models import TreeModel, prepare
from harts.objective import CustomObjective, Objective, Supervised, cispo, dapo, grpo, gspo, ppo
from harts.step import Execution, StepResult, compute_logprobs, train_step

__version__ = "0.1.0"

__all__ = [
    "CheckReport",
    "CustomObjective",
    "Execution",
    "GroupShape",
    "Objective",
    "RolloutGroup",
    "SkippedLines",
    "StepResult",
    "Supervised",
    "Trajectory",
    "TreeModel",
    "check_model",
    "cispo",
    "compute_logprobs",
    "dapo",
    "grpo",
    "gspo",
    "ppo",
    "prepare",
    "read",
    "train_step",
]
