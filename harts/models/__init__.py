"""A Hugging Face model in, the same model executing on a layout out; unknown layers are refused."""

from harts.models.adapter import TreeModel, prepare
from harts.models.expert_bias import update_expert_bias

__all__ = ["TreeModel", "prepare", "update_expert_bias"]
