"""Runs of chunked linear attention for a kernel that walks the whole tree in one launch (model T).

A kernel of our own may hand a state over inside a run. So a run need not end where paths part: it follows the longest
path through all branch points, and the others start from the state that it publishes at the last chunk boundary before
they leave. One run a leaf, the replays of `harts.layout.rounds` and no others, and no rounds at all: a run waits for
one state of one run.

Work is taken from a queue, so a run must stand behind all it waits for. Forward it waits for the run it starts from,
which is longer; backward for the gradients of all runs that start inside it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from harts.data.ragged import ranges
from harts.layout.rounds import check_chunk_size, find_heirs, owners, path_from
from harts.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchPlan:
    """Which rows a single launch works through, and which states it hands over. `G` counts chunks.

    Example (abcde, abxy, abcz, abc packed as a b c d e z x y, chunks of 2):
        runs  abcde  cz  xy    run_offsets [0, 5, 7, 9]   token_R [0, 1, 2, 3, 4, 2, 5, 6, 7]
        chunks  ab cd e | cz | xy    slot_G [-1, 0, -1, -1, -1]   start_slot [-1, 0, 0]: both start after ab
    """

    chunk_size: int
    """C, tokens of a chunk."""
    token_R: NDArray[np.int64]
    """[R] int64. Packed token of each row; a run's rows are consecutive on one path."""
    owner_T: NDArray[np.int64]
    """[T] int64. The one row from which a token's output is taken."""
    run_offsets: NDArray[np.int64]
    """[runs + 1] int64. Rows of run `r` are `run_offsets[r]:run_offsets[r + 1]` (a kernel's cu_seqlens)."""
    start_slot: NDArray[np.int64]
    """[runs] int64. Slot of the state that each run starts from; -1 for the zero state."""
    slot_G: NDArray[np.int64]
    """[G] int64. Slot to which the state before each chunk is published, in run order; -1 for most chunks. Never the
    first chunk of a run: what it starts from is published already."""

    @property
    def num_slots(self) -> int:
        """States that are handed over."""
        return int(self.slot_G.max()) + 1

    @property
    def chunks_of_run(self) -> NDArray[np.int64]:
        """[runs] int64, >= 1."""
        return -(-np.diff(self.run_offsets) // self.chunk_size)


def plan_launch(tree: PrefixTree, chunk_size: int) -> LaunchPlan:
    """Give each leaf its run.

    Args:
        tree: The tree of one microbatch.
        chunk_size: C >= 1, tokens of a chunk.

    Returns:
        The runs, in the order in which a walk in pre-order opens them. Rows, replays included, are as many as
        `plan_runs` has. Time is linear in segments and rows.

    Raises:
        ValueError: If `chunk_size` is not positive.
    """
    check_chunk_size(chunk_size)
    parents, starts, ends, offsets = (a.tolist() for a in (tree.parent_S, tree.start_S, tree.end_S, tree.offset_S))
    boundaries = (tree.end_S // chunk_size * chunk_size).tolist()
    heirs = find_heirs(tree)
    slices: list[tuple[int, int, int, bool]] = []
    first_depth: list[int] = []  # at which each run starts
    source: list[tuple[int, int]] = []  # run and depth of the state each run starts from
    run_of_segment: list[int] = []
    holders: list[int] = []  # segment with the last token before the boundary before each segment's end
    for segment, above in enumerate(parents):
        inside = boundaries[segment] > starts[segment]
        holders.append(segment if inside else holders[above] if above >= 0 else -1)
        if above >= 0 and heirs[above] == segment:
            run = run_of_segment[above]
        else:
            run = len(first_depth)
            depth = boundaries[above] if above >= 0 else 0
            first_depth.append(depth)
            source.append((run_of_segment[holders[above]], depth) if depth else (-1, 0))
            for ancestor in path_from(depth, above, parents, ends):
                begin = max(starts[ancestor], depth)
                slices.append((run, offsets[ancestor] + begin - starts[ancestor], ends[ancestor] - begin, False))
        slices.append((run, offsets[segment], ends[segment] - starts[segment], True))
        run_of_segment.append(run)
    return _lay_out(np.array(slices, dtype=np.int64), np.array(first_depth), np.array(source), chunk_size)


def _lay_out(
    slices: NDArray[np.int64], first_depth: NDArray[np.int64], source: NDArray[np.int64], chunk_size: int
) -> LaunchPlan:
    """Write out rows, run by run, and number the states that are handed over."""
    run, begin, size, owned = slices[np.argsort(slices[:, 0], kind="stable")].T
    token_R = ranges(begin, size)
    run_offsets = np.zeros(first_depth.size + 1, dtype=np.int64)
    np.cumsum(np.bincount(run, weights=size, minlength=first_depth.size).astype(np.int64), out=run_offsets[1:])
    chunks = -(-np.diff(run_offsets) // chunk_size)
    first_G = np.cumsum(chunks) - chunks
    source_run, depth = source.T
    waits = source_run >= 0
    chunk = np.where(waits, first_G[source_run] + (depth - first_depth[source_run]) // chunk_size, -1)
    published, slot = np.unique(chunk[waits], return_inverse=True)
    assert not np.isin(published, first_G).any(), "a run's own initial state is published by the run it comes from"
    start_slot = np.full(first_depth.size, -1, dtype=np.int64)
    start_slot[waits] = slot
    slot_G = np.full(int(chunks.sum()), -1, dtype=np.int64)
    slot_G[published] = np.arange(published.size)
    return LaunchPlan(
        chunk_size=chunk_size,
        token_R=token_R,
        owner_T=owners(token_R, np.repeat(owned, size)),
        run_offsets=run_offsets,
        start_slot=start_slot,
        slot_G=slot_G,
    )


def forward_queue(plan: LaunchPlan) -> NDArray[np.int64]:
    """[runs] int64. The longest runs first: each is longer than those that wait for it."""
    return np.argsort(-plan.chunks_of_run, kind="stable")


def backward_queue(plan: LaunchPlan) -> NDArray[np.int64]:
    """[runs] int64. Runs behind all that start inside them; of those left, the one that ends deepest goes first."""
    chunks, start_slot = plan.chunks_of_run, plan.start_slot.tolist()
    run_of_slot, level_of_slot = _sources(plan)
    ends = chunks.tolist()  # chunks on the path to the end of each run
    waiting_for = [0] * len(ends)
    for run, slot in enumerate(start_slot):  # runs come after those they start from
        if slot >= 0:
            source = run_of_slot[slot]
            ends[run] += ends[source] - int(chunks[source]) + level_of_slot[slot]
            waiting_for[source] += 1
    ready = [(-end, run) for run, end in enumerate(ends) if not waiting_for[run]]
    heapq.heapify(ready)
    queue = []
    while ready:
        _, run = heapq.heappop(ready)
        queue.append(run)
        if start_slot[run] >= 0:
            source = run_of_slot[start_slot[run]]
            waiting_for[source] -= 1
            if not waiting_for[source]:
                heapq.heappush(ready, (-ends[source], source))
    assert len(queue) == len(ends), "runs start from runs before them"
    return np.array(queue, dtype=np.int64)


def _sources(plan: LaunchPlan) -> tuple[list[int], list[int]]:
    """The run that publishes each slot, and how many of its chunks come before."""
    chunks = plan.chunks_of_run
    published = np.flatnonzero(plan.slot_G >= 0)  # in the order of slots
    run = np.repeat(np.arange(chunks.size), chunks)[published]
    return run.tolist(), (published - (np.cumsum(chunks) - chunks)[run]).tolist()


def trunk_first(plan: LaunchPlan, queue: NDArray[np.int64]) -> NDArray[np.int64]:
    """[runs] int64. A backward queue with the longest run taken up at once.

    All but it wait for runs ahead of them. It waits inside, while other programs finish what it waits for: shorter by
    the time of all side branches on a tree with one long trunk, but safe only where its programs leave room for others.
    """
    longest = int(plan.chunks_of_run.argmax())
    return np.concatenate([[longest], queue[queue != longest]])


def trunk_first_pays(plan: LaunchPlan) -> bool:
    """Whether the longest run is estimated to end sooner if it is taken up first, with half of the device.

    Times are in chunks of a run whose programs fill half of the device. Taken up last, it starts when all other runs
    have gone through the whole device. Taken up first, it can pass a state when the runs that hang on deeper ones and
    on this one have gone through the other half: soon on a trunk with side branches all along, late on a prefix whose
    branches all leave at its end.
    """
    chunks, start_slot = plan.chunks_of_run, plan.start_slot.tolist()
    trunk = int(chunks.argmax())
    run_of_slot, level_of_slot = _sources(plan)
    leaves_at = [0] * chunks.size  # chunk of the trunk before which each run, or what it hangs on, leaves it
    waited_for = np.zeros(int(chunks[trunk]) + 1, dtype=np.int64)
    for run, slot in enumerate(start_slot):  # runs come after those they start from
        if slot < 0:
            continue
        source = run_of_slot[slot]
        leaves_at[run] = level_of_slot[slot] if source == trunk else leaves_at[source]
        waited_for[leaves_at[run]] += chunks[run]
    waited_for[0] = 0  # of other trees: nothing waits for them
    deeper = np.cumsum(waited_for[::-1])[::-1]
    first = (deeper + np.arange(deeper.size))[deeper > 0].max(initial=int(chunks[trunk]))
    last = (chunks.sum() - chunks[trunk]) / 2 + chunks[trunk]
    return bool(first < last)


_ON_THE_HOST = ("chunk_size", "mean_parallel_runs", "trunk_first_pays")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchIndex:
    """A launch plan as the tensors that kernels read: built once a microbatch, used by all layers.

    Kernels of fla see runs as packed sequences.
    """

    chunk_size: int
    """C, tokens of a chunk."""
    cu_seqlens: Tensor
    """[runs + 1] int64, on the device. `run_offsets` of the plan."""
    chunk_indices: Tensor
    """[G, 2] int64. Run of each chunk, and its number in the run: what fla would wait for the device to work out."""
    slot_G: Tensor
    """[G] int32. As in the plan."""
    forward_queue: Tensor
    """[runs, 5] int64, in the order in which runs are taken up: run, first row, rows, first chunk, start slot or -1."""
    backward_queue: Tensor
    """[runs, 5] int64. The same for the backward pass."""
    trunk_first_queue: Tensor
    """[runs, 5] int64. The same with the longest run first, which waits while it runs."""
    trunk_first_pays: bool
    """Whether that is estimated to be faster where its programs take no more than half of the device."""
    mean_parallel_runs: float
    """Chunks over those of the longest path: how many runs there is work for at a time."""
    slot_offsets: Tensor
    """[slots + 1] int32. Runs that start from slot `s` are `slot_runs[slot_offsets[s]:slot_offsets[s + 1]]`."""
    slot_runs: Tensor
    """[max(waiting runs, 1)] int32, ascending within a slot: the order in which their gradients are added."""

    @property
    def num_runs(self) -> int:
        """Sequences of the call."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_slots(self) -> int:
        """States that are handed over."""
        return self.slot_offsets.numel() - 1

    def to(self, device: torch.device) -> LaunchIndex:
        """The same on another device."""
        names = [f.name for f in fields(self) if f.name not in _ON_THE_HOST]
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


def launch_index(plan: LaunchPlan) -> LaunchIndex:
    """Put a plan into tensors, on the CPU."""
    chunks = plan.chunks_of_run
    run_G = np.repeat(np.arange(chunks.size), chunks)
    chunk_offsets = np.concatenate([[0], np.cumsum(chunks)])
    waiting = np.flatnonzero(plan.start_slot >= 0)
    slot_runs = waiting[np.argsort(plan.start_slot[waiting], kind="stable")]
    counts = np.bincount(plan.start_slot[waiting], minlength=plan.num_slots)
    queue = backward_queue(plan)
    offsets = plan.run_offsets
    runs = np.stack(
        [np.arange(chunks.size), offsets[:-1], np.diff(offsets), chunk_offsets[:-1], plan.start_slot], axis=1
    )
    return LaunchIndex(
        chunk_size=plan.chunk_size,
        cu_seqlens=torch.from_numpy(plan.run_offsets),
        chunk_indices=torch.from_numpy(np.stack([run_G, np.arange(run_G.size) - chunk_offsets[run_G]], axis=1)),
        slot_G=_int32(plan.slot_G),
        forward_queue=torch.from_numpy(runs[forward_queue(plan)]),
        backward_queue=torch.from_numpy(runs[queue]),
        trunk_first_queue=torch.from_numpy(runs[trunk_first(plan, queue)]),
        trunk_first_pays=trunk_first_pays(plan),
        mean_parallel_runs=run_G.size / int(chunks.max()),
        slot_offsets=_int32(np.concatenate([[0], np.cumsum(counts)])),
        slot_runs=_int32(slot_runs if slot_runs.size else np.zeros(1, dtype=np.int64)),
    )


def _int32(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
