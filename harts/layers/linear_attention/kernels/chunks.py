"""Which rows a program takes that works on one chunk and does not ask which chunk comes before it."""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of_chunk(chunk, cu_seqlens, chunk_indices, BT: tl.constexpr):
    """First row of a chunk, and rows from there to the end of its run, which may be more than BT; both int64."""
    run = tl.load(chunk_indices + chunk * 2)
    first = tl.load(cu_seqlens + run).to(tl.int64) + tl.load(chunk_indices + chunk * 2 + 1) * BT
    return first, tl.load(cu_seqlens + run + 1) - first
