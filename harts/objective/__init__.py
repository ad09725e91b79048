"""Restored per-trajectory streams in, the loss out."""
