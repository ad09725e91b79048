"""A tree, a cost model and a token limit in; which trajectories run together out."""

from harts.plan.cost import CostModel
from harts.plan.plan import Microbatch, Plan, make_plan

__all__ = ["CostModel", "Microbatch", "Plan", "make_plan"]
