"""Trees for the kernels of linear attention, and what their states are by definition, in any dtype of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harts.data import TrajectoryBatch
from harts.layout.conv_index import RowIndex, row_index
from harts.layout.launch import LaunchIndex, launch_index, plan_launch
from harts.tree import build_prefix_tree, tree_from_lcp
from harts.tree.prefix_tree import PrefixTree
from tests.cases import Case, trajectories_of
from tests.layout.building import caterpillar, random_segments, tree_of_segments


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A tree's rows in run order, and its chunks."""

    launch: LaunchIndex
    token_R: Tensor
    """[R] int64. Packed token of each row."""
    owner_T: Tensor
    """[T] int64. The row that owns each token."""
    index: RowIndex
    """Both, for kernels."""
    parent_T: Tensor
    """[T] int64. Packed token before each; -1 at a root."""
    chunks: list[tuple[int, int, int]]
    """First row, one past the last, and the chunk after whose last token the chunk goes on; -1 at a root."""
    paths: list[Tensor]
    """Packed tokens of each trajectory, in the tree's order."""

    def to(self, device: torch.device) -> Rows:
        """The same with tensors on another device."""
        return Rows(
            launch=self.launch.to(device),
            token_R=self.token_R.to(device),
            owner_T=self.owner_T.to(device),
            index=self.index.to(device),
            parent_T=self.parent_T,
            chunks=self.chunks,
            paths=[path.to(device) for path in self.paths],
        )


def rows_of(tree: PrefixTree, chunk_size: int) -> Rows:
    """Plan a launch. Where chunks go on is found from tokens, not taken from the plan."""
    plan = plan_launch(tree, chunk_size)
    length_S = tree.end_S - tree.start_S
    parent_T = np.arange(tree.num_tokens) - 1
    last_S = tree.offset_S + length_S - 1
    parent_T[tree.offset_S] = np.where(tree.parent_S < 0, -1, last_S[tree.parent_S])
    chunks: list[tuple[int, int, int]] = []
    full: dict[int, int] = {-1: -1}  # chunk that ends with each token, where a chunk is full
    for begin, end in zip(plan.run_offsets[:-1].tolist(), plan.run_offsets[1:].tolist(), strict=True):
        for first in range(begin, end, chunk_size):
            last = min(first + chunk_size, end)
            chunks.append((first, last, full[int(parent_T[plan.token_R[first]])]))
            if last - first == chunk_size:
                token = int(plan.token_R[last - 1])
                assert token not in full, "a full chunk is in one run"
                full[token] = len(chunks) - 1
    return Rows(
        launch=launch_index(plan),
        token_R=torch.from_numpy(plan.token_R),
        owner_T=torch.from_numpy(plan.owner_T),
        index=row_index(tree.num_tokens, plan),
        parent_T=torch.from_numpy(parent_T),
        chunks=chunks,
        paths=_paths(tree, parent_T.tolist()),
    )


def _paths(tree: PrefixTree, parent: list[int]) -> list[Tensor]:
    """Tokens that a trajectory adds to those before it are packed in its order; the rest are above them."""
    new_N = (tree.length_N - tree.lcp_N).tolist()
    paths: list[list[int]] = []
    packed = 0
    for new, lcp in zip(new_N, tree.lcp_N.tolist(), strict=True):
        shared = paths[-1][:lcp] if paths else []
        assert not new or parent[packed] == (shared[-1] if shared else -1)
        paths.append(shared + list(range(packed, packed + new)))
        packed += new
    return [torch.tensor(path) for path in paths]


def tree_of_case(case: Case) -> PrefixTree:
    """The tree of a case that all tests share."""
    return build_prefix_tree(TrajectoryBatch.of(trajectories_of(case)))


def lengths(values: Sequence[int]) -> PrefixTree:
    """Trajectories of these lengths that share nothing."""
    return tree_from_lcp(np.arange(len(values)), list(values), [0] * len(values))


def star(prompt: int, rollouts: int, tokens: int) -> PrefixTree:
    """A prompt with many rollouts: all wait for one state."""
    lcp = [0] + [prompt] * (rollouts - 1)
    return tree_from_lcp(np.arange(rollouts), [prompt + tokens] * rollouts, lcp)


def deep(cuts: int, chunk_size: int, *, seed: int = 0) -> PrefixTree:
    """A caterpillar: a side leaf leaves the trunk in nearly every chunk."""
    piece = range(chunk_size - chunk_size // 4, chunk_size + chunk_size // 4)
    return tree_of_segments(caterpillar(cuts, piece, range(1, chunk_size + 2), seed=seed))


def bushy(count: int, chunk_size: int, *, seed: int = 0) -> PrefixTree:
    """Segments below random others."""
    return tree_of_segments(random_segments(count, range(1, 2 * chunk_size), seed=seed))


TREES: dict[str, Callable[[int], PrefixTree]] = {
    "lengths around a chunk": lambda c: lengths([1, c - 1, c, c + 1, 2 * c, 3 * c - 1]),
    "branches around a boundary": lambda c: tree_from_lcp(
        np.arange(6), [4 * c, 2 * c - 1, 2 * c, 2 * c + 1, 3 * c, c + 1], [0, c - 1, c, c, c + 1, c]
    ),
    "star": lambda c: star(c + 3, 12, 5),
    "caterpillar": lambda c: deep(14, c),
    "bushy": lambda c: bushy(14, c),
}
"""Trees by chunk size."""


def walk(rows: Rows, zero: Tensor, advance: Callable[[slice, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """States before and after every chunk, each chunk going on from the one that its tokens follow."""
    before: list[Tensor] = []
    after: list[Tensor] = []
    for begin, end, source in rows.chunks:
        before.append(after[source] if source >= 0 else zero)
        after.append(advance(slice(begin, end), before[-1]))
    return before, after


def cumulative_decay(rows: Rows, shape: tuple[int, ...], strongest: float) -> Tensor:
    """[1, R, *shape] float32. log2-decays summed from the beginning of each chunk."""
    generator = torch.Generator().manual_seed(1)
    decay = -strongest * torch.rand(rows.token_R.numel(), *shape, generator=generator)
    return torch.cat([decay[begin:end].cumsum(0) for begin, end, _ in rows.chunks])[None]
