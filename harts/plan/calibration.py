"""Cost parameters from timed microbatches, and how well they predict microbatches that they were not fitted to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from harts.plan.cost import CostParameters, ModelDimensions
from harts.plan.sharing import ExecutionCosts
from harts.plan.size import MicrobatchSize

FORMAT_VERSION = 2
BUSY = 2.0
"""Times what the host takes to start a pass, from which on a pass is fitted: the device works all through it."""
COLUMNS = {
    "per_token": "tokens",
    "per_pair": "pairs",
    "per_window_pair": "window_pairs",
    "per_loss_edge": "loss_edges",
    "per_run": "runs",
    "per_round": "rounds",
    "per_replayed": "replayed",
}
"""Field of `CostParameters` -> what it multiplies. Experts follow the tokens, so a fit cannot tell them apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One timed microbatch."""

    size: MicrobatchSize
    """What it consisted of."""
    seconds: float
    """> 0. Forward and backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Parameters of one execution and their errors on samples that were held out."""

    parameters: CostParameters
    """Seconds."""
    held_out: tuple[Sample, ...]
    """Samples that the fit has not seen."""
    least: float = 0.0
    """Seconds that the host takes to start a pass's kernels, which no pass falls below; 0 where it runs them itself."""

    @property
    def errors(self) -> NDArray[np.float64]:
        """|predicted - measured| / measured, for each held-out sample."""
        predicted = np.array([self.predict(sample.size) for sample in self.held_out])
        measured = np.array([sample.seconds for sample in self.held_out])
        return np.abs(predicted - measured) / measured

    def predict(self, size: MicrobatchSize) -> float:
        """Seconds of one microbatch."""
        return max(self.least, self.parameters.predict(size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Fitted costs of a model on a device."""

    model: str
    """As it was named."""
    device: str
    """Where it ran, in words."""
    dtype: str
    """Of its parameters."""
    dimensions: ModelDimensions
    """Of the model."""
    tree: Fit
    """Packed trees."""
    flat: Fit
    """Trajectories one a row."""
    saved_bytes_per_token: float
    """Bytes that autograd kept for a token of the largest tree, without recomputation."""

    @property
    def costs(self) -> ExecutionCosts:
        """For the comparison of both executions."""
        return ExecutionCosts(
            tree=self.tree.parameters,
            flat=self.flat.parameters,
            chunk_size=self.dimensions.chunk_size,
            windows=self.dimensions.windows,
        )

    def to_json(self) -> str:
        """JSON that a person can read."""
        return json.dumps({"version": FORMAT_VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Read what `to_json` wrote.

        Raises:
            ValueError: If the text is no calibration or one of another version.
        """
        values = json.loads(text)
        version = values.pop("version", None) if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(f"Got a calibration of version {version}, expected {FORMAT_VERSION}. Calibrate again.")
        try:
            dimensions = values.pop("dimensions")
            return cls(
                dimensions=ModelDimensions(**{**dimensions, "windows": tuple(dimensions["windows"])}),
                tree=_read_fit(values.pop("tree")),
                flat=_read_fit(values.pop("flat")),
                **values,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"The calibration is damaged: {error!r}. Run `harts calibrate` again.") from error


def busy(samples: Sequence[Sample], least: float) -> list[Sample]:
    """Samples that keep the device at work, all of them if `least` is 0.

    The others take about as long as the host takes to start them, which says nothing of what they consist of.

    Args:
        samples: Timed microbatches.
        least: Seconds that the host takes to start a pass.

    Raises:
        ValueError: If there are none.
    """
    found = [sample for sample in samples if sample.seconds >= BUSY * least]
    if not found:
        longest = max(samples, key=lambda sample: sample.seconds)
        raise ValueError(
            f"The longest pass takes {longest.seconds:.3f} s ({longest.size.tokens:,} tokens), expected at least "
            f"{BUSY * least:.3f}: the host takes {least:.3f} to start one. Time larger ones (--max-tokens)."
        )
    return found


def fit(samples: Sequence[Sample], *, held_out: Sequence[Sample], least: float = 0.0) -> Fit:
    """Find parameters >= 0 that predict timed microbatches with the least sum of squared relative errors.

    Args:
        samples: To fit; more than there are parameters.
        held_out: For the errors only.
        least: Seconds that the host takes to start a pass.

    Raises:
        ValueError: If there are too few samples or a time is not positive.
    """
    names = [name for name, field in COLUMNS.items() if any(getattr(s.size, field) for s in samples)]
    if len(samples) <= len(names) + 1:
        raise ValueError(
            f"Got {len(samples)} samples for {len(names) + 1} parameters, expected more. Time more, or larger ones."
        )
    seconds = np.array([sample.seconds for sample in samples])
    if not (seconds > 0).all():
        raise ValueError(f"Got a time of {seconds.min()} s, expected all > 0. Check the clock.")
    rows = [[getattr(s.size, COLUMNS[name]) for name in names] + [1] for s in samples]
    matrix = np.array(rows, dtype=np.float64) / seconds[:, None]
    # Columns of one size, so that the solver's tolerance means the same for all of them.
    scale = np.linalg.norm(matrix, axis=0)
    values = nonnegative_least_squares(matrix / scale, np.ones(seconds.size)) / scale
    parameters = dict(zip([*names, "per_microbatch"], values.tolist(), strict=True))
    return Fit(parameters=CostParameters(**parameters), held_out=tuple(held_out), least=least)


def nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 with the smallest ||matrix x - target|| (Lawson and Hanson, Solving Least Squares Problems, 1974).

    Args:
        matrix: [rows, columns] float64.
        target: [rows] float64.
    """
    columns = matrix.shape[1]
    free = np.zeros(columns, dtype=bool)
    x = np.zeros(columns)
    tolerance = 1e-12 * np.abs(matrix.T @ target).max()
    # Each pass frees the column that helps most; three passes a column are ample (cycling needs exact ties).
    for _ in range(3 * columns):
        descent = np.where(free, -np.inf, matrix.T @ (target - matrix @ x))
        if descent.max() <= tolerance:
            break
        free[descent.argmax()] = True
        while True:
            candidate = np.zeros(columns)
            candidate[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (candidate <= 0)
            if not negative.any():
                break
            # Go as far towards the candidate as all stay >= 0, and fix those that reach 0.
            step = (x[negative] / (x[negative] - candidate[negative])).min()
            x += step * (candidate - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = candidate
    return x


def _read_fit(values: dict[str, object]) -> Fit:
    known = {f.name for f in fields(Fit)}
    if set(values) != known:
        raise TypeError(f"a fit has the fields {sorted(known)}")
    held_out = [
        Sample(size=MicrobatchSize(**s["size"]), seconds=s["seconds"])
        for s in values["held_out"]  # type: ignore[attr-defined]
    ]
    return Fit(
        parameters=CostParameters(**values["parameters"]),  # type: ignore[arg-type]
        held_out=tuple(held_out),
        least=values["least"],  # type: ignore[arg-type]
    )
