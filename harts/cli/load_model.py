"""The configuration or the model behind a name that `--model` takes."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from harts.cli.model_names import HELP
from harts.models.registry import family_of_type
from harts.models.tiny import tiny_model


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
