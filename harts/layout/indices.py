"""What the layers' kernels index with: built when the first layer asks, kept for all others of the microbatch.

Which of it is needed depends on the kernels, and these on the device and dtype that the layers find at run time. So
nothing is built ahead, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from harts.layout.attention_blocks import AttentionBlocks, attention_blocks
from harts.layout.attention_paths import AttentionPaths, attention_paths
from harts.layout.blocks import QueryBlock, query_blocks
from harts.layout.chunk_index import ChunkIndex, chunk_index
from harts.layout.conv_index import ConvIndex, conv_index
from harts.layout.launch import LaunchIndex, LaunchPlan, launch_index, plan_launch
from harts.layout.rounds import RunPlan
from harts.tree.prefix_tree import PrefixTree


class Index(Protocol):
    """Tensors that move together."""

    def to(self, device: torch.device, /) -> Self:
        """The same on another device."""
        ...


BuiltT = TypeVar("BuiltT")
IndexT = TypeVar("IndexT", bound=Index)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelIndices:
    """Of one microbatch. Two threads that ask at once may both build; they get equal indices."""

    tree: PrefixTree
    """The microbatch's trees."""
    parent_T: NDArray[np.int64]
    """[T] int64. As in the layout, on the host."""
    subtree_end_T: NDArray[np.int64]
    """[T] int64. The same."""
    position_T: NDArray[np.int64]
    """[T] int64. The same."""
    root_start_T: NDArray[np.int64]
    """[T] int64. First token of each token's tree."""
    runs: RunPlan | None
    """Of its linear attention."""
    conv_width: int
    """J of its widest short convolution."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where the indices go."""
    built: dict[Hashable, object] = field(default_factory=dict)
    """What is there already, by kind and sizes."""

    def to(self, device: torch.device) -> KernelIndices:
        """The same for another device, with nothing built yet."""
        return replace(self, device=device, built={})

    def query_blocks(self, block_size: int) -> tuple[QueryBlock, ...]:
        """Key lists of the SDPA path, for blocks of so many queries."""

        def build() -> tuple[QueryBlock, ...]:
            blocks = query_blocks(
                self.subtree_end_T, self.root_start_T, position_T=self.position_T, block_size=block_size
            )
            return tuple(block.to(self.device) for block in blocks)

        return self.once(("query_blocks", block_size), build)

    def attention(
        self, forward_size: tuple[int, int], backward_size: tuple[int, int], window: int | None
    ) -> AttentionBlocks:
        """Block lists of a block-sparse kernel, for its block sizes (queries, keys)."""
        return self._moved(
            ("attention", forward_size, backward_size, window),
            lambda: attention_blocks(
                self.subtree_end_T,
                self.position_T,
                forward_size=forward_size,
                backward_size=backward_size,
                window=window,
            ),
        )

    def attention_paths(self) -> AttentionPaths:
        """Every path with its keys one after the other, for exact attention."""
        return self._moved("attention_paths", lambda: attention_paths(self.subtree_end_T, self.position_T))

    def chunks(self) -> ChunkIndex:
        """Chunks by level, for linear attention in plain PyTorch."""
        assert self.runs is not None, "the family states chunk_size in its layout needs"
        runs = self.runs
        return self._moved("chunks", lambda: chunk_index(runs))

    def launch(self, chunk_size: int | None = None) -> LaunchIndex:
        """Runs of linear attention in one launch, in chunks of the family's size or another."""
        return self._moved(("launch", chunk_size), lambda: launch_index(self._launch_plan(chunk_size)))

    def launch_conv(self, chunk_size: int | None = None) -> ConvIndex:
        """Short convolutions whose outputs are rows of `launch`."""
        width = max(2, self.conv_width)  # of width 1, only the rows are used
        return self._moved(
            ("launch_conv", chunk_size), lambda: conv_index(self.parent_T, width, self._launch_plan(chunk_size))
        )

    def conv(self) -> ConvIndex:
        """Short convolutions of the packed tokens."""
        return self._moved("conv", lambda: conv_index(self.parent_T, self.conv_width))

    def _launch_plan(self, chunk_size: int | None) -> LaunchPlan:
        assert self.runs is not None, "the family states chunk_size in its layout needs"
        size = chunk_size or self.runs.chunk_size
        return self.once(("launch_plan", size), lambda: plan_launch(self.tree, size))

    def _moved(self, key: Hashable, build: Callable[[], IndexT]) -> IndexT:
        return self.once(key, lambda: build().to(self.device))

    def once(self, key: Hashable, build: Callable[[], BuiltT]) -> BuiltT:
        """What `build` gave when the key was asked for first. For what a kernel makes of the indices itself."""
        if key not in self.built:
            self.built[key] = build()
        return cast(BuiltT, self.built[key])
