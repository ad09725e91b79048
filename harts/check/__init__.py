"""A user's model and rollouts in, how far trees are from trajectory-wise training out."""

from harts.check.bits import BitsReport, check_bits
from harts.check.report import CheckReport
from harts.check.run import check_model

__all__ = ["BitsReport", "CheckReport", "check_bits", "check_model"]
