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
from harts.inspect import TreeView, describe
from harts.layers.moe.losses import RouterLosses
from harts.layers.moe.statistics import RouterStatistics
from harts.layout.kernels import Kernels
from harts.microbatches import Execution
from harts.models import TreeModel, prepare, update_expert_bias
from harts.objective import CustomObjective, Objective, Supervised, cispo, dapo, grpo, gspo, ppo
from harts.routers import count_load, record_routes
from harts.step import StepResult, compute_logprobs, train_step
from harts.tree import route_conflicts

__version__ = "0.1.0"

__all__ = [
    "CheckReport",
    "CustomObjective",
    "Execution",
    "GroupShape",
    "Kernels",
    "Objective",
    "RolloutGroup",
    "RouterLosses",
    "RouterStatistics",
    "SkippedLines",
    "StepResult",
    "Supervised",
    "Trajectory",
    "TreeModel",
    "TreeView",
    "check_model",
    "cispo",
    "compute_logprobs",
    "count_load",
    "dapo",
    "describe",
    "grpo",
    "gspo",
    "ppo",
    "prepare",
    "read",
    "record_routes",
    "route_conflicts",
    "train_step",
    "update_expert_bias",
]
