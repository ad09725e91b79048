"""HARTS: agentic RL on rollout trees, each shared token computed once, exact.

    rollouts -> data -> trajectories -> tree -> prefix tree -> plan -> microbatches -> layout -> packed layout
    packed layout -> layers, models -> hidden states -> logprobs -> log-probs -> objective -> loss -> train -> gradients

`harts/step.py` runs the stages in this order and is the first file to read. Public names are imported when they
are first used: reading rollouts and looking at their trees needs no torch.

Example:
    >>> import harts
    >>> trajectories = [harts.Trajectory.of([1, 2, 3, 4]), harts.Trajectory.of([1, 2, 5])]
    >>> model = harts.prepare(hf_model)  # doctest: +SKIP
    >>> harts.train_step(model, trajectories, harts.grpo())  # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULE_OF = {
    "CheckReport": "harts.check",
    "CustomObjective": "harts.objective",
    "Execution": "harts.microbatches",
    "GroupShape": "harts.data.readers",
    "Kernels": "harts.layout.kernels",
    "Objective": "harts.objective",
    "RolloutGroup": "harts.data",
    "RouterLosses": "harts.layers.moe.losses",
    "RouterStatistics": "harts.layers.moe.statistics",
    "SkippedLines": "harts.data.readers",
    "StepResult": "harts.step",
    "Supervised": "harts.objective",
    "Trajectory": "harts.data",
    "TreeModel": "harts.models",
    "TreeView": "harts.inspect",
    "check_model": "harts.check",
    "cispo": "harts.objective",
    "compute_logprobs": "harts.step",
    "count_load": "harts.routers",
    "dapo": "harts.objective",
    "describe": "harts.inspect",
    "grpo": "harts.objective",
    "gspo": "harts.objective",
    "ppo": "harts.objective",
    "prepare": "harts.models",
    "read": "harts.data.readers",
    "record_routes": "harts.routers",
    "route_conflicts": "harts.tree",
    "train_step": "harts.step",
    "update_expert_bias": "harts.models",
}
"""Where every public name comes from; type checkers read the imports above instead."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, imported now (PEP 562)."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
