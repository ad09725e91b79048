"""A Hugging Face model in, the same model executing on a layout out; unknown layers are refused."""

from harts.models.adapter import TreeModel, prepare

__all__ = ["TreeModel", "prepare"]
