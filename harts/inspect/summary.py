"""What sharing there is in rollouts, group by group and in all: numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.inspect.groups import GroupTree
from harts.inspect.histogram import Histogram
from harts.inspect.predict import ModelCosts, Prediction, predict
from harts.tree import PrefixTree, describe_tree

CHUNK_SIZES = (64, 128, 256)
"""Of which rounds and replay are counted; the first is that of the headline figures."""
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReport:
    """Chunked linear attention on a tree, for one chunk size."""

    chunk_size: int
    """C."""
    rounds_f: int
    """Sequential calls of kernels that return final states only (model F)."""
    rounds_e: int
    """Sequential calls of kernels that also return the states inside runs (model E)."""
    replayed: int
    """Rows that repeat a token, because a path parts from another inside a chunk."""
    on_boundary: int
    """Branch points that lie on a chunk boundary, so that nothing is replayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReport:
    """One group."""

    name: str
    """What the file calls it. Text from a file: escape it before showing it."""
    trajectories: int
    """N."""
    tokens_flat: int
    """Tokens of all trajectories."""
    tokens_distinct: int
    """Tokens of the tree."""
    trained_flat: int
    """Trained tokens of all trajectories."""
    trained_distinct: int
    """Trained tokens of the tree."""
    segments: int
    """S."""
    segment_lengths: tuple[int, ...]
    """Tokens of a segment that these `QUANTILES` of all do not exceed."""
    branch_points: int
    """Tokens after which paths part."""
    max_depth: int
    """Largest number of branch points on one path."""
    chunks: tuple[ChunkReport, ...]
    """For each of `CHUNK_SIZES`."""
    prediction: Prediction | None
    """For the model; None without one."""

    @property
    def ratio(self) -> float:
        """Tokens of all trajectories over distinct ones."""
        return self.tokens_flat / self.tokens_distinct

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings for JSON."""
        first = self.chunks[0]
        return {
            "name": self.name,
            "trajectories": self.trajectories,
            "tokens_flat": self.tokens_flat,
            "tokens_distinct": self.tokens_distinct,
            "ratio": self.ratio,
            "trained_flat": self.trained_flat,
            "trained_distinct": self.trained_distinct,
            "branch_points": self.branch_points,
            "max_depth": self.max_depth,
            "rounds_f": first.rounds_f,
            "rounds_e": first.rounds_e,
            "replayed_tokens": first.replayed,
            "predicted_speedup": None if self.prediction is None else self.prediction.speedup,
            "segments": self.segments,
            "segment_length_quantiles": dict(zip(map(str, QUANTILES), self.segment_lengths, strict=True)),
            "chunk_sizes": [self._chunk_row(chunk) for chunk in self.chunks],
            "memory_bytes": None if self.prediction is None else self.prediction.memory,
            "memory_bytes_recomputed": None if self.prediction is None else self.prediction.memory_recomputed,
        }

    def _chunk_row(self, chunk: ChunkReport) -> dict[str, float]:
        return {
            "chunk_size": chunk.chunk_size,
            "rounds_f": chunk.rounds_f,
            "rounds_e": chunk.rounds_e,
            "replayed": chunk.replayed,
            "replayed_share": chunk.replayed / self.tokens_distinct,
            "on_boundary": chunk.on_boundary / self.branch_points if self.branch_points else 0.0,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InspectReport:
    """All groups."""

    groups: tuple[GroupReport, ...]
    """In the order of the files."""
    segment_lengths: Histogram
    """Tokens of a segment, over all segments."""
    trajectory_lengths: Histogram
    """Tokens of a trajectory."""
    multiplicities: Histogram
    """Trajectories that contain a segment."""
    skipped: int
    """Damaged records."""

    def total(self, name: str) -> int:
        """Sum of a field over groups."""
        return sum(getattr(group, name) for group in self.groups)

    @property
    def ratio(self) -> float:
        """Tokens of all trajectories over distinct ones."""
        return self.total("tokens_flat") / self.total("tokens_distinct")

    @property
    def predicted_speedup(self) -> float | None:
        """Predicted cost of all groups flat over that on trees, a pass a group; None without a model."""
        predictions = self.predictions
        if not predictions:
            return None
        shared = math.fsum(p.shared for p in predictions)
        return math.fsum(p.flat for p in predictions) / shared if shared else math.inf

    @property
    def predictions(self) -> list[Prediction]:
        """Of every group; empty without a model."""
        return [group.prediction for group in self.groups if group.prediction is not None]

    def chunk_rows(self) -> list[dict[str, float]]:
        """For each chunk size: rounds (median and most over groups), replay, share of branches on boundaries."""
        rows = []
        for i, chunk_size in enumerate(CHUNK_SIZES):
            chunks = [group.chunks[i] for group in self.groups]
            replayed = sum(chunk.replayed for chunk in chunks)
            branches = self.total("branch_points")
            rows.append(
                {
                    "chunk_size": chunk_size,
                    "rounds_f": max(chunk.rounds_f for chunk in chunks),
                    "rounds_f_median": median(chunk.rounds_f for chunk in chunks),
                    "rounds_e": max(chunk.rounds_e for chunk in chunks),
                    "rounds_e_median": median(chunk.rounds_e for chunk in chunks),
                    "replayed": replayed,
                    "replayed_share": replayed / self.total("tokens_distinct"),
                    "on_boundary": sum(c.on_boundary for c in chunks) / branches if branches else 0.0,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings for JSON: the headline first. Rounds and replay are those of chunks of 64."""
        rows = self.chunk_rows()
        predictions = self.predictions
        return {
            "groups": len(self.groups),
            "trajectories": self.total("trajectories"),
            "tokens_flat": self.total("tokens_flat"),
            "tokens_distinct": self.total("tokens_distinct"),
            "ratio": self.ratio,
            "branch_points": self.total("branch_points"),
            "max_depth": max(group.max_depth for group in self.groups),
            "rounds_f": rows[0]["rounds_f"],
            "rounds_e": rows[0]["rounds_e"],
            "replayed_tokens": rows[0]["replayed"],
            "predicted_speedup": self.predicted_speedup,
            "skipped": self.skipped,
            "trained_flat": self.total("trained_flat"),
            "trained_distinct": self.total("trained_distinct"),
            "segments": self.total("segments"),
            "segment_length_quantiles": _quantiles(self.segment_lengths),
            "trajectory_length_quantiles": _quantiles(self.trajectory_lengths),
            "chunk_sizes": rows,
            "memory_bytes": max((p.memory for p in predictions), default=None),
            "memory_bytes_recomputed": max((p.memory_recomputed for p in predictions), default=None),
        }


class Inspection:
    """Adds up groups as they are read; keeps a few numbers of each.

    Example:
        >>> from harts.data import RolloutGroup
        >>> from harts.data.trajectory import example_trajectories
        >>> from harts.inspect.groups import group_tree
        >>> inspection = Inspection()
        >>> inspection.add(group_tree(RolloutGroup(name="letters", trajectories=tuple(example_trajectories()))))
        >>> inspection.report().to_dict()["ratio"]
        2.0
    """

    def __init__(self, model: ModelCosts | None = None) -> None:
        """Nothing added yet; with a model, costs and memory are predicted."""
        self._model = model
        self._groups: list[GroupReport] = []
        self._lengths, self._trajectories, self._multiplicities = Histogram(), Histogram(), Histogram()

    def add(self, group: GroupTree) -> None:
        """Count one group."""
        tree = group.tree
        self._groups.append(report_group(group, self._model))
        self._lengths.add(tree.end_S - tree.start_S)
        self._trajectories.add(tree.length_N)
        self._multiplicities.add(tree.multiplicity_S)

    def report(self, *, skipped: int = 0) -> InspectReport:
        """What was found.

        Raises:
            ValueError: If there was no group.
        """
        if not self._groups:
            raise ValueError("Got no trajectories, expected at least one group. Is it the right file?")
        return InspectReport(
            groups=tuple(self._groups),
            segment_lengths=self._lengths,
            trajectory_lengths=self._trajectories,
            multiplicities=self._multiplicities,
            skipped=skipped,
        )


def report_group(group: GroupTree, model: ModelCosts | None = None) -> GroupReport:
    """Count one group."""
    tree = group.tree
    summary = describe_tree(tree)
    trained_distinct = int(group.trained_S.sum())
    return GroupReport(
        name=group.name,
        trajectories=summary.num_trajectories,
        tokens_flat=summary.num_trajectory_tokens,
        tokens_distinct=summary.num_tokens,
        trained_flat=group.trained_tokens,
        trained_distinct=trained_distinct,
        segments=tree.parent_S.size,
        segment_lengths=_exact_quantiles(tree.end_S - tree.start_S),
        branch_points=summary.num_branch_points,
        max_depth=summary.max_depth,
        chunks=report_chunks(tree, CHUNK_SIZES),
        prediction=None if model is None else predict(tree, model, loss_edges=(trained_distinct, group.trained_tokens)),
    )


def report_chunks(tree: PrefixTree, chunk_sizes: Sequence[int]) -> tuple[ChunkReport, ...]:
    """Rounds and replay for each chunk size."""
    from harts.plan.run_counts import count_rounds_e, count_runs

    segments = (tree.parent_S, tree.start_S, tree.end_S)
    branch_end = tree.end_S[tree.num_children_S > 1]
    reports = []
    for chunk_size in chunk_sizes:
        _, rounds_f, replayed = count_runs(*segments, chunk_size)
        reports.append(
            ChunkReport(
                chunk_size=chunk_size,
                rounds_f=rounds_f,
                rounds_e=count_rounds_e(*segments, chunk_size),
                replayed=replayed,
                on_boundary=int(np.count_nonzero(branch_end % chunk_size == 0)),
            )
        )
    return tuple(reports)


def _exact_quantiles(values: NDArray[np.int64]) -> tuple[int, ...]:
    """As `Histogram.quantiles`."""
    ranks = [max(1, math.ceil(share * values.size)) for share in QUANTILES]
    return tuple(np.sort(values)[np.array(ranks) - 1].tolist())


def _quantiles(histogram: Histogram) -> dict[str, int]:
    return dict(zip(map(str, QUANTILES), histogram.quantiles(QUANTILES), strict=True))
