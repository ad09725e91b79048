"""Chunkwise linear attention along tree paths; `reference.py` is the definition."""
