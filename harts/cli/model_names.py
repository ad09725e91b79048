"""What `--model` may name: a Hub model or folder, tiny:TYPE, default:TYPE, a config.json, a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harts.plan.calibration import Calibration
from harts.plan.cost import CostParameters, ModelDimensions
from harts.plan.sharing import ExecutionCosts

HELP = (
    "A Hugging Face name or folder, tiny:TYPE, default:TYPE (transformers' default configuration of that type), "
    "a config.json, or what `harts calibrate` wrote."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedCosts:
    """The costs behind a name."""

    dimensions: ModelDimensions
    """Of the model."""
    costs: ExecutionCosts
    """FLOPs, or seconds if fitted."""
    calibration: Calibration | None = None
    """Where they come from, if they are fitted."""

    @property
    def fitted(self) -> bool:
        """Whether they come from a calibration."""
        return self.calibration is not None

    @property
    def saved_bytes_per_token(self) -> float | None:
        """That autograd keeps, if it was measured."""
        return None if self.calibration is None else self.calibration.saved_bytes_per_token


def find_costs(name: str) -> NamedCosts:
    """Costs of a model, derived from its configuration unless it names a calibration.

    Raises:
        ValueError: If the name is not understood or the model does not run on trees.
    """
    if name.endswith(".json") and Path(name).is_file() and '"dimensions"' in Path(name).read_text(encoding="utf-8"):
        calibration = Calibration.from_json(Path(name).read_text(encoding="utf-8"))
        return NamedCosts(dimensions=calibration.dimensions, costs=calibration.costs, calibration=calibration)
    # A calibration needs neither transformers nor torch, which take seconds to import.
    from harts.cli.load_model import find_config
    from harts.models.dimensions import model_dimensions

    dimensions = model_dimensions(find_config(name))
    flops = CostParameters.of_dimensions(dimensions)
    costs = ExecutionCosts(tree=flops, flat=flops, chunk_size=dimensions.chunk_size, windows=dimensions.windows)
    return NamedCosts(dimensions=dimensions, costs=costs)
