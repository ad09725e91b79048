"""The shortest plan of a small step: by trying all partitions, or by OR-tools CP-SAT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from harts.plan.problem import Problem
from harts.plan.slots import recount


def partitions(count: int) -> Iterator[list[int]]:
    """Every way to put `count` things in unnamed bins, as the bin of each."""

    def extend(prefix: list[int]) -> Iterator[list[int]]:
        if len(prefix) == count:
            yield prefix
            return
        for number in range(max(prefix, default=-1) + 2):
            yield from extend([*prefix, number])

    return extend([])


def exhaustive_optimum(problem: Problem) -> int:
    """Least makespan in units over all partitions of the jobs, empty microbatches allowed; with barriers."""
    assert problem.barrier
    best = None
    for bins in partitions(problem.num_jobs):
        work_B, tokens_B = recount(problem, np.array(bins))
        if tokens_B.max() <= problem.limit:
            heights = np.sort(work_B)[::-1][:: problem.ranks]
            makespan = int(heights.sum()) + heights.size * problem.overhead
            best = makespan if best is None else min(best, makespan)
    assert best is not None
    return best


def proved_optimum(problem: Problem, *, num_slots: int, start: int, seconds: float) -> int | None:
    """Least makespan in units with up to `num_slots` slots, from CP-SAT; None if it is not proved in time.

    Args:
        problem: With barriers.
        num_slots: Slots that may be used.
        start: Units. A makespan that is known to be reached.
        seconds: Time for the proof.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    bins = [(slot, rank) for slot in range(num_slots) for rank in range(problem.ranks)]
    own_S, parent_S = problem.own_S.tolist(), problem.parent_S.tolist()
    holds: dict[tuple[int, tuple[int, int]], Any] = {
        (segment, at): model.new_bool_var(f"{segment} {at}") for segment in range(len(own_S)) for at in bins
    }
    for tail in problem.tail_J.tolist():
        model.add_exactly_one(holds[tail, at] for at in bins)
    for (segment, at), held in holds.items():
        if parent_S[segment] >= 0:
            model.add_implication(held, holds[parent_S[segment], at])
    heights = [model.new_int_var(0, start, f"height {slot}") for slot in range(num_slots)]
    used = [model.new_bool_var(f"used {slot}") for slot in range(num_slots)]
    work: dict[tuple[int, int], Any] = {}
    for slot, rank in bins:
        held = [holds[segment, (slot, rank)] for segment in range(len(own_S))]
        work[slot, rank] = sum(w * h for w, h in zip(own_S, held, strict=True))
        model.add(work[slot, rank] <= heights[slot])
        if rank > 0:  # the names of ranks are free
            model.add(work[slot, rank] <= work[slot, rank - 1])
        model.add(sum(t * h for t, h in zip(problem.size_S.tolist(), held, strict=True)) <= problem.limit)
        for h in held:
            model.add_implication(h, used[slot])
    for slot in range(num_slots - 1):  # the order of slots is free
        model.add(heights[slot] >= heights[slot + 1])
    makespan = sum(heights) + problem.overhead * sum(used)
    model.add(makespan <= start)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 0
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
