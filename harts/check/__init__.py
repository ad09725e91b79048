"""A user's model and rollouts in, how far trees are from trajectory-wise training out."""

from harts.check.report import CheckReport
from harts.check.run import check_model

__all__ = ["CheckReport", "check_model"]
