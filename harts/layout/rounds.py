"""Runs and rounds of chunked linear attention on a tree (model F: kernels that return final states only).

A run is a piece of one root-to-leaf path that starts at a multiple of the chunk size with a known state. A round is
a set of runs whose initial states are all known: one packed call of a kernel.

Chunks must begin where they would if each trajectory ran alone, so a path that parts from another inside a chunk
goes back to the start of that chunk and replays the tokens up to the branch point. A *boundary* is the end of a full
chunk; it is a *cut* if paths part there or before the next one, for then several runs need its state. Cutting at
these boundaries and nowhere else takes the fewest rounds, runs and replayed rows at once, under these assumptions: a
run is one path, starts at the chunk of its first owned row, and returns only its final state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harts.data.ragged import ranges
from harts.layout.schedule import critical_path, schedule
from harts.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunPlan:
    """Which tokens run after which state, in run order.

    Runs are sorted by round; rows of a run are consecutive on one path. `R` counts rows, replays included.

    Example (abcde, abxy, abcz, abc packed as a b c d e z x y, chunks of 2):
        runs  ab | cde  cz  xy    run_parent [-1, 0, 0, 0]  run_round [0, 1, 1, 1]  run_offsets [0, 2, 5, 7, 9]
        rows  token_R [0, 1, 2, 3, 4, 2, 5, 6, 7]  owner_T [0, 1, 2, 3, 4, 6, 7, 8]: cz replays c, which cde owns
    """

    chunk_size: int
    """C, tokens of a chunk."""
    token_R: NDArray[np.int64]
    """[R] int64. Packed token of each row."""
    owner_T: NDArray[np.int64]
    """[T] int64. The one row from which a token's output is taken."""
    run_offsets: NDArray[np.int64]
    """[runs + 1] int64. Rows of run `r` are `run_offsets[r]:run_offsets[r + 1]` (a kernel's cu_seqlens)."""
    run_parent: NDArray[np.int64]
    """[runs] int64. Run whose final state is this run's initial state; -1 for the zero state."""
    run_round: NDArray[np.int64]
    """[runs] int64, ascending from 0. Larger than the parent's."""

    @property
    def num_rounds(self) -> int:
        """Sequential kernel calls."""
        return int(self.run_round[-1]) + 1

    @property
    def num_replayed(self) -> int:
        """Rows whose output is not taken."""
        return self.token_R.size - self.owner_T.size

    @property
    def critical_path(self) -> int:
        """Sum over rounds of the longest run's chunks: the sequential steps of one call a round."""
        return critical_path(self.run_round, -(-np.diff(self.run_offsets) // self.chunk_size))


def plan_runs(tree: PrefixTree, chunk_size: int, *, replay: bool = True) -> RunPlan:
    """Cut a tree into runs and give each its round.

    Args:
        tree: The tree of one microbatch.
        chunk_size: C >= 1, tokens of a chunk.
        replay: False starts new chunks right after every branch point instead: no row is repeated, but chunk
            boundaries move, and so do results in finite precision. For tests and ablations only.

    Returns:
        The runs. With replay, the rounds are 1 plus the most cuts on a path, every child of a branch point but one
        replays less than a chunk, and a state is only ever read at a boundary. Trajectories that end inside or equal
        others change nothing. Runs go in the rounds of `harts.layout.schedule.schedule`. Time is linear in segments
        and rows.

    Raises:
        ValueError: If `chunk_size` is not positive.
    """
    check_chunk_size(chunk_size)
    draft = _cut_into_runs(tree, _find_cuts(tree, chunk_size if replay else None))
    run, size = draft.slices[:, 0], draft.slices[:, 2]
    parent = np.array(draft.parent_of_run, dtype=np.int64)
    rows = np.zeros_like(parent)
    np.add.at(rows, run, size)
    return _lay_out(draft, schedule(parent, -(-rows // chunk_size)), chunk_size)


def rounds_if_interior_states(tree: PrefixTree, chunk_size: int) -> int:
    """Rounds that would do if a kernel also returned the states at chunk boundaries inside runs (model E).

    Then a run need not end where others branch off, so one path goes on through all of its branch points. What is
    left is the Horton-Strahler number of the tree of boundaries and path ends: 1 at an end; at a boundary the largest
    number among those next below, or one more than the second largest if that is larger, since only one of them can
    go on in the run that passes the boundary. All that start at the root start together.

    Args:
        tree: The tree of one microbatch.
        chunk_size: C >= 1, tokens of a chunk.

    Returns:
        At least 1, at most `plan_runs(tree, chunk_size).num_rounds` and 1 + log2 of the number of leaves. No schedule
        of runs under the assumptions of this module needs fewer. Time is linear in segments.

    Raises:
        ValueError: If `chunk_size` is not positive.

    Example (a trunk with three side branches, a chunk apart):
        >>> from harts.tree import tree_from_lcp
        >>> tree = tree_from_lcp([0, 1, 2, 3], [9, 9, 9, 9], [0, 2, 4, 6])
        >>> plan_runs(tree, 2).num_rounds, rounds_if_interior_states(tree, 2)
        (4, 2)
    """
    check_chunk_size(chunk_size)
    parents = tree.parent_S.tolist()
    has_boundary = (tree.end_S // chunk_size * chunk_size > tree.start_S).tolist()
    # The two largest numbers among the boundaries and path ends next below each segment's end; last, below the roots.
    first, second = [0] * (len(parents) + 1), [0] * (len(parents) + 1)
    for segment in range(len(parents) - 1, -1, -1):
        high, low = max(first[segment], 1), second[segment]
        numbers = (max(high, low + 1),) if has_boundary[segment] else (high, low)
        above = parents[segment]  # -1, the last place, for a root
        for number in numbers:
            if number > first[above]:
                first[above], second[above] = number, first[above]
            elif number > second[above]:
                second[above] = number
    return first[-1]


def check_chunk_size(chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(
            f"Got chunk_size {chunk_size}, expected at least 1. Use the chunk size of the model's kernels."
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Cuts:
    """Where runs start again below each segment."""

    boundary_S: NDArray[np.int64]
    """[S] int64. Depth of the last boundary at or before the end of each segment; 0 is the start of the path."""
    holder_S: NDArray[np.int64]
    """[S] int64. Segment that contains the last token before that boundary; -1 if the boundary is 0."""
    is_cut_S: NDArray[np.bool_]
    """[S] bool. Whether runs start at the last boundary inside the segment; no segment has a second cut."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Draft:
    """Runs in the order in which a walk in pre-order opens them, rows as slices of the packed tokens."""

    parent_of_run: list[int]
    """Smaller than the run's own number; -1 for the zero state."""
    slices: NDArray[np.int64]
    """[slices, 4] int64. Run, first packed token, tokens, and 1 if the run owns them (0: replayed); those of a run are
    in the order of its path."""


def _find_cuts(tree: PrefixTree, chunk_size: int | None) -> _Cuts:
    """Cut at the last boundary before each branch point; without a chunk size, at the branch point itself."""
    boundary_S = tree.end_S if chunk_size is None else tree.end_S // chunk_size * chunk_size
    holders: list[int] = []
    inside_S = boundary_S > tree.start_S
    for segment, (parent, inside) in enumerate(zip(tree.parent_S.tolist(), inside_S.tolist(), strict=True)):
        holders.append(segment if inside else holders[parent] if parent >= 0 else -1)
    holder_S = np.array(holders, dtype=np.int64)
    is_cut_S = np.zeros(holder_S.size, dtype=bool)
    is_cut_S[holder_S[(tree.num_children_S > 1) & (holder_S >= 0)]] = True
    return _Cuts(boundary_S=boundary_S, holder_S=holder_S, is_cut_S=is_cut_S)


def find_heirs(tree: PrefixTree) -> list[int]:
    """The child with the longest path below each segment, the first of equals; -1 for a leaf.

    The heir's run owns the tokens between boundary and branch point that its siblings replay. Who owns them changes
    no count, and the longest path is the one that should not wait.
    """
    parents, deepest = tree.parent_S.tolist(), tree.end_S.tolist()
    heirs = [-1] * len(parents)
    for segment in range(len(parents) - 1, -1, -1):
        parent = parents[segment]
        if parent >= 0 and deepest[segment] >= deepest[parent]:
            deepest[parent], heirs[parent] = deepest[segment], segment
    return heirs


def _cut_into_runs(tree: PrefixTree, cuts: _Cuts) -> _Draft:
    parents, starts, ends, offsets = (a.tolist() for a in (tree.parent_S, tree.start_S, tree.end_S, tree.offset_S))
    boundaries, holders, is_cut = cuts.boundary_S.tolist(), cuts.holder_S.tolist(), cuts.is_cut_S.tolist()
    heirs = find_heirs(tree)
    parent_of_run: list[int] = []
    slices: list[tuple[int, int, int, bool]] = []
    last_run = [-1] * len(parents)  # the run that holds the end of each segment
    cut_run = [-1] * len(parents)  # the run that ends at the cut in each segment

    def open_run(parent_run: int) -> int:
        parent_of_run.append(parent_run)
        return len(parent_of_run) - 1

    def take(run: int, segment: int, begin: int, end: int, owned: bool) -> None:
        if end > begin:
            slices.append((run, offsets[segment] + begin - starts[segment], end - begin, owned))

    for segment, above in enumerate(parents):
        if above >= 0 and heirs[above] == segment:
            run = last_run[above]
        elif above >= 0:
            run = open_run(cut_run[holders[above]] if holders[above] >= 0 else -1)
            for ancestor in path_from(boundaries[above], above, parents, ends):
                take(run, ancestor, max(starts[ancestor], boundaries[above]), ends[ancestor], False)
        else:
            run = open_run(-1)
        begin = starts[segment]
        if is_cut[segment]:
            take(run, segment, begin, boundaries[segment], True)
            begin, cut_run[segment] = boundaries[segment], run
            run = open_run(run)
        take(run, segment, begin, ends[segment], True)
        last_run[segment] = run
    return _Draft(parent_of_run=parent_of_run, slices=np.array(slices, dtype=np.int64))


def path_from(depth: int, segment: int, parents: list[int], ends: list[int]) -> list[int]:
    """Segments of the path to `segment` that have tokens at or below a depth, from the top down."""
    path: list[int] = []
    while segment >= 0 and ends[segment] > depth:
        path.append(segment)
        segment = parents[segment]
    return path[::-1]


def _lay_out(draft: _Draft, round_of_run: NDArray[np.int64], chunk_size: int) -> RunPlan:
    """Sort runs by round, in the order of the draft within a round, and write out their rows."""
    order = np.argsort(round_of_run, kind="stable")
    place = np.argsort(order)
    slices = draft.slices[np.argsort(place[draft.slices[:, 0]], kind="stable")]
    run, begin, size, owned = slices.T
    token_R = ranges(begin, size)
    rows = np.bincount(np.repeat(place[run], size), minlength=order.size)
    parent = np.array(draft.parent_of_run, dtype=np.int64)[order]
    return RunPlan(
        chunk_size=chunk_size,
        token_R=token_R,
        owner_T=owners(token_R, np.repeat(owned, size)),
        run_offsets=np.concatenate([[0], np.cumsum(rows)]),
        run_parent=np.where(parent >= 0, place[parent], -1),
        run_round=round_of_run[order],
    )


def owners(token_R: NDArray[np.int64], owned_R: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] the row that owns each packed token, from the token of each row and whether the row owns it (0: a replay)."""
    rows = np.flatnonzero(owned_R)
    owner_T = np.full(rows.size, -1, dtype=np.int64)
    owner_T[token_R[rows]] = rows
    assert (owner_T >= 0).all(), "every packed token has one owner"
    return owner_T
