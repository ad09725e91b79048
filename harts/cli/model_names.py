"""What `--model` may name: a Hub model or folder, tiny:TYPE, default:TYPE, a config.json, a calibration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from harts.models.dimensions import model_dimensions
from harts.models.registry import family_of_type
from harts.models.tiny import tiny_model
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
    fitted: bool
    """Whether they come from a calibration."""


def find_costs(name: str) -> NamedCosts:
    """Costs of a model, derived from its configuration unless it names a calibration.

    Raises:
        ValueError: If the name is not understood or the model does not run on trees.
    """
    if name.endswith(".json") and Path(name).is_file() and '"dimensions"' in Path(name).read_text(encoding="utf-8"):
        calibration = Calibration.from_json(Path(name).read_text(encoding="utf-8"))
        return NamedCosts(dimensions=calibration.dimensions, costs=calibration.costs, fitted=True)
    dimensions = model_dimensions(find_config(name))
    flops = CostParameters.of_dimensions(dimensions)
    costs = ExecutionCosts(tree=flops, flat=flops, chunk_size=dimensions.chunk_size, windows=dimensions.windows)
    return NamedCosts(dimensions=dimensions, costs=costs, fitted=False)


def find_config(name: str) -> PreTrainedConfig:
    """The configuration of a model.

    Raises:
        ValueError: If there is none.
    """
    kind, _, model_type = name.partition(":")
    if kind == "tiny":
        return tiny_model(_known(model_type, name)).config
    if kind == "default":
        return AutoConfig.for_model(_known(model_type, name))
    try:
        if name.endswith(".json"):
            fields = json.loads(Path(name).read_text(encoding="utf-8"))
            return AutoConfig.for_model(**fields)
        return AutoConfig.from_pretrained(name)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"--model {name}: {error} Expected: {HELP}") from error


def load_model(name: str, *, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """A model to time: with its weights if it names a Hub model or a folder, with random ones otherwise."""
    try:
        with torch.device(device):
            return _build_model(name, dtype)
    except OSError as error:  # what transformers raises for a name that is neither a folder nor on the Hub
        raise ValueError(f"--model {name}: {error}") from error


def _build_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    if name.startswith("tiny:"):
        return tiny_model(_known(name.removeprefix("tiny:"), name), dtype=dtype)
    if name.startswith("default:") or name.endswith(".json"):
        return AutoModelForCausalLM.from_config(find_config(name).get_text_config(), dtype=dtype).train()
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).train()


def _known(model_type: str, name: str) -> str:
    try:
        text_type, _ = family_of_type(model_type)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from error
    return text_type
