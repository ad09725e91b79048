"""A launch as arguments of fla's functions."""

from __future__ import annotations

from typing import Any

from harts.layout.launch import LaunchIndex


def runs_of(launch: LaunchIndex) -> dict[str, Any]:
    """Runs as packed sequences, for functions that know the chunk size from a tensor."""
    return {"cu_seqlens": launch.cu_seqlens, "chunk_indices": launch.chunk_indices}


def chunks_of(launch: LaunchIndex) -> dict[str, Any]:
    """Runs as packed sequences, and their chunk size."""
    return {**runs_of(launch), "chunk_size": launch.chunk_size}
