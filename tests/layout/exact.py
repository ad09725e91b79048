"""The shortest critical path in the fewest rounds, by OR-tools CP-SAT."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harts.layout.schedule import earliest_rounds, latest_rounds


def shortest_by_cp_sat(parent: NDArray[np.int64], chunks: NDArray[np.int64], *, seconds: float = 60.0) -> int:
    """Least sum of the rounds' longest runs, proved; fails if the time does not suffice."""
    from ortools.sat.python import cp_model

    earliest = earliest_rounds(parent)
    num_rounds = int(earliest.max()) + 1
    latest = latest_rounds(parent, num_rounds)
    model: Any = cp_model.CpModel()
    longest = [model.new_int_var(1, int(chunks.max()), "") for _ in range(num_rounds)]
    rounds: list[Any] = []
    for run, above in enumerate(parent.tolist()):
        here = {r: model.new_bool_var("") for r in range(earliest[run], latest[run] + 1)}
        model.add_exactly_one(here.values())
        for number, is_here in here.items():
            model.add(longest[number] >= int(chunks[run])).only_enforce_if(is_here)
        rounds.append(sum(number * is_here for number, is_here in here.items()))
        if above >= 0:
            model.add(rounds[above] + 1 <= rounds[run])
    model.minimize(sum(longest))
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return int(solver.objective_value)
