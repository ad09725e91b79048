"""The packed layout: one microbatch's trees in pre-order.

A token's descendants are contiguous in pre-order, so query `q` sees key `k` iff `k <= q < subtree_end_T[k]`, at any
depth. Everything that layers index with is built here once a microbatch and reused by all of them. Does not shard
over context.

Shapes (docs/notation.md has the whole alphabet): `T` packed tokens, `R` rows of the run order, `S` segments,
`N` trajectories, `F` tokens of all trajectories, `P` trained ones of these, `E` loss edges, `G` chunks of `C` tokens,
`J` taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.data.ragged import ranges
from harts.layout.blocks import QueryBlock
from harts.layout.chunk_index import ChunkIndex
from harts.layout.edges import LossEdges, loss_edges
from harts.layout.indices import KernelIndices
from harts.layout.kernels import Kernels
from harts.layout.paths import TokenPaths, doubling_jumps
from harts.layout.rounds import RunPlan, plan_runs
from harts.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutNeeds:
    """What a model's layers index with; stated by its family."""

    chunk_size: int | None
    """C of its chunked linear attention; None if it has none."""
    conv_width: int
    """J of its widest short convolution; 1 if it has none."""
    query_block_size: int = 128
    """Queries of a block of the SDPA path. Larger blocks see more branches they must mask out."""
    replay: bool = True
    """False starts chunks at branch points instead of where training alone starts them. An ablation: inexact."""
    kernels: Kernels = field(default_factory=Kernels)
    """Kernels that were asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLayout:
    """The distinct tokens of a microbatch and how layers walk them.

    Example (`abcde`, `abxy`, `abcz`, `abc`): tokens a b c d e z x y, `parent_T` [-1 0 1 2 3 2 1 6],
    `subtree_end_T` [8 8 6 5 5 6 8 8], `multiplicity_T` [4 4 3 1 1 1 1 1].
    """

    token_ids_T: Tensor
    """[T] int64. Vocabulary ids."""
    position_T: Tensor
    """[T] int64. Depth on the path: the position the token has in its trajectories."""
    parent_T: Tensor
    """[T] int64. Packed index of the token before; -1 at a root."""
    subtree_end_T: Tensor
    """[T] int64. One past the last descendant of each token."""
    multiplicity_T: Tensor
    """[T] int64, >= 1. Trajectories that contain the token."""
    ancestors_JT: Tensor
    """[J - 1, T] int64. Row `j` holds each token's `j + 1`-th nearest ancestor, T for none."""
    runs: RunPlan | None
    """Runs and rounds of linear attention (NumPy); None without linear attention."""
    indices: KernelIndices
    """What kernels index with, built when the first layer asks."""
    needs: LayoutNeeds
    """What it was packed for."""
    edges: LossEdges
    """Loss edges and the way back to every trajectory."""
    routes_TMA: Tensor | None
    """[T, M, A] int32. Recorded experts, -1 where none were; None without recorded routes."""
    paths: TokenPaths
    """Trajectories as paths, in the tree's order, for what is summed over each of them."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids_T.numel()

    def token_rows(self) -> NDArray[np.int64]:
        """[F] int64. Packed token of every token of every trajectory, in the tree's order of trajectories."""
        return flat_to_packed(self.indices.tree)

    @property
    def query_blocks(self) -> tuple[QueryBlock, ...]:
        """Key lists of the SDPA path."""
        return self.indices.query_blocks(self.needs.query_block_size)

    @property
    def chunks(self) -> ChunkIndex:
        """The chunks of all runs."""
        return self.indices.chunks()

    def to(self, device: torch.device) -> PackedLayout:
        """The same layout with every tensor on another device."""
        tensors = ("token_ids_T", "position_T", "parent_T", "subtree_end_T", "multiplicity_T", "ancestors_JT")
        return replace(
            self,
            **{name: getattr(self, name).to(device, non_blocking=True) for name in tensors},
            indices=self.indices.to(device),
            edges=self.edges.to(device),
            routes_TMA=None if self.routes_TMA is None else self.routes_TMA.to(device, non_blocking=True),
            paths=self.paths.to(device),
        )


def pack(tree: PrefixTree, batch: TrajectoryBatch, needs: LayoutNeeds) -> PackedLayout:
    """Lay out the trees of one microbatch.

    Args:
        tree: Of the microbatch's trajectories; its numbers are those of `batch`.
        batch: The whole step.
        needs: Of the model that will run it.
    """
    length_S = tree.end_S - tree.start_S
    position_T = ranges(tree.start_S, length_S)
    parent_T = np.arange(tree.num_tokens) - 1
    root_S = tree.parent_S < 0
    parent_T[tree.offset_S] = np.where(root_S, -1, (tree.offset_S + length_S - 1)[tree.parent_S])
    subtree_end_T = np.repeat(_subtree_end(tree), length_S)
    root_of_S = np.maximum.accumulate(np.where(root_S, np.arange(root_S.size), 0))
    root_start_T = np.repeat(tree.offset_S[root_of_S], length_S)
    # What a trajectory adds to those before it in the tree's order is packed consecutively.
    new_T = ranges(batch.offsets[tree.order_N] + tree.lcp_N, tree.length_N - tree.lcp_N)
    token_ids_T = batch.token_ids_F[new_T]
    policy, token_P = _packed_policy_tokens(tree, batch)
    runs = None if needs.chunk_size is None else plan_runs(tree, needs.chunk_size, replay=needs.replay)
    return PackedLayout(
        token_ids_T=torch.from_numpy(token_ids_T),
        position_T=torch.from_numpy(position_T),
        parent_T=torch.from_numpy(parent_T),
        subtree_end_T=torch.from_numpy(subtree_end_T),
        multiplicity_T=torch.from_numpy(np.repeat(tree.multiplicity_S, length_S)),
        ancestors_JT=_ancestors(torch.from_numpy(parent_T), needs.conv_width),
        runs=runs,
        indices=KernelIndices(
            tree=tree,
            parent_T=parent_T,
            subtree_end_T=subtree_end_T,
            position_T=position_T,
            root_start_T=root_start_T,
            runs=runs,
            conv_width=needs.conv_width,
        ),
        needs=needs,
        edges=loss_edges(token_P, batch.temperature_N[batch.trajectory_P[policy]], parent_T, token_ids_T),
        routes_TMA=None if batch.routes_FMA is None else torch.from_numpy(batch.routes_FMA[new_T]),
        paths=TokenPaths(
            segment_T=torch.from_numpy(np.repeat(np.arange(length_S.size), length_S)),
            jumps=doubling_jumps(tree.parent_S),
            tail_N=torch.from_numpy(tree.tail_N),
            length_N=tree.length_N,
            weight_N=batch.weight_N[tree.order_N],
        ),
    )


def flat_to_packed(tree: PrefixTree) -> NDArray[np.int64]:
    """`restore_F`: the packed index of every token of every trajectory, in the tree's order of trajectories.

    A trajectory's tokens beyond what it shares with the one before are new and packed consecutively.
    """
    return np.concatenate([path_L.copy() for path_L in _paths(tree)])


def _paths(tree: PrefixTree) -> Iterator[NDArray[np.int64]]:
    """Packed tokens of one trajectory after the other, in a buffer that the next one overwrites."""
    new_N = tree.length_N - tree.lcp_N
    path_L = np.empty(tree.length_N.max(), dtype=np.int64)
    for length, lcp, begin in zip(tree.length_N, tree.lcp_N, np.cumsum(new_N) - new_N, strict=True):
        path_L[lcp:length] = np.arange(begin, begin + length - lcp)
        yield path_L[:length]


def _packed_policy_tokens(tree: PrefixTree, batch: TrajectoryBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The trained tokens in the tree's order of trajectories: their `P` columns, and their packed tokens."""
    policy = batch.policy_tokens(tree.order_N)
    trajectory_P = batch.trajectory_P[policy]
    depth_P = batch.trained_P[policy] - batch.offsets[trajectory_P]
    ends_N = np.cumsum(np.bincount(trajectory_P, minlength=batch.num_trajectories)[tree.order_N])
    # Only trained tokens are looked up: all tokens of all trajectories may be many times the distinct ones.
    pieces = [path_L[depths] for path_L, depths in zip(_paths(tree), np.split(depth_P, ends_N[:-1]), strict=True)]
    return policy, np.concatenate(pieces)


def _subtree_end(tree: PrefixTree) -> NDArray[np.int64]:
    """[S] one past the last packed token below each segment; children come after parents, so one backward pass."""
    end_S = tree.offset_S + tree.end_S - tree.start_S
    for segment in range(end_S.size - 1, -1, -1):
        parent = tree.parent_S[segment]
        if parent >= 0 and end_S[segment] > end_S[parent]:
            end_S[parent] = end_S[segment]
    return end_S


def _ancestors(parent_T: Tensor, conv_width: int) -> Tensor:
    # One extra slot makes "no ancestor" (T) its own ancestor.
    parent = torch.cat([parent_T, parent_T.new_tensor([-1])])
    parent[parent < 0] = parent_T.numel()
    rows, ancestor = [], torch.arange(parent_T.numel())
    for _ in range(conv_width - 1):
        ancestor = parent[ancestor]
        rows.append(ancestor)
    return torch.stack(rows) if rows else parent_T.new_empty(0, parent_T.numel())
