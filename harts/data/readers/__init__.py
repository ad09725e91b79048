"""Rollout files in, trajectories or tree shapes out; one file a format. Readers stream and name what is wrong where."""

from harts.data.readers.formats import FORMATS
from harts.data.readers.read import SkippedLines, read
from harts.data.readers.shape import GroupShape
from harts.data.readers.shapes import read_shapes
from harts.data.readers.trajectories import read_trajectories, write_trajectories

__all__ = [
    "FORMATS",
    "GroupShape",
    "SkippedLines",
    "read",
    "read_shapes",
    "read_trajectories",
    "write_trajectories",
]
