"""Rollouts in, `Trajectory` objects and one columnar `TrajectoryBatch` a step out."""

from harts.data.batch import TrajectoryBatch
from harts.data.group import RolloutGroup
from harts.data.trajectory import Trajectory

__all__ = ["RolloutGroup", "Trajectory", "TrajectoryBatch"]
