"""Rollouts in, `Trajectory` objects and one columnar `TrajectoryBatch` a step out."""

from harts.data.batch import TrajectoryBatch
from harts.data.trajectory import Trajectory

__all__ = ["Trajectory", "TrajectoryBatch"]
