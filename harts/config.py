"""The settings of `harts train`: frozen dataclasses, read from a YAML file and `key=value` overrides.

Everything that can be derived from these is. A key that does not exist and a value that does not fit are errors that
name the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

EnvironmentName = Literal["GuessTheNumber-v0-raw", "TowerOfHanoi-v0-raw", "Mastermind-v0-raw"]
ObjectiveName = Literal["grpo", "dapo", "gspo", "cispo", "ppo"]


def _number(default: Any, minimum: float, *, above: bool = False, maximum: float = math.inf) -> Any:
    """A setting with a range: `minimum <= value <= maximum`, or `minimum < value` if `above`."""
    return field(default=default, metadata={"minimum": minimum, "above": above, "maximum": maximum})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Qwen3.5 architecture with random weights: linear attention, every fourth layer (or the last) full attention."""

    num_layers: int = _number(4, 2)
    """Layers."""
    width: int = _number(64, 32)
    """D, the hidden width; a multiple of 32. Heads are 32 wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """What is played in a step of RL."""

    environment: EnvironmentName = "GuessTheNumber-v0-raw"
    """A single-player game of textarena."""
    max_turns: int | None = _number(None, 1)
    """Valid moves an episode may have; None for the game's own limit."""
    tolerated_errors: int = _number(0, 0)
    """Illegal moves in a row that an episode survives. The games' own number is 1; 0 makes legality worth learning."""
    num_groups: int = _number(10, 1)
    """Games (seeds) of a step."""
    siblings: int = _number(8, 2)
    """Episodes of each game. Their rewards are compared with each other."""
    temperature: float = _number(1.0, 0, above=True)
    """Of the sampling."""
    max_action_tokens: int | None = _number(None, 1)
    """An action that is not ended by then makes no legal move; None for the longest action of random legal play."""
    branch_at: int | None = _number(None, 1)
    """Play half of the siblings up to this turn only once: each running episode is copied there. None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """Behaviour cloning of random legal play, so that RL starts from legal moves."""

    steps: int = _number(30, 0)
    """Optimizer steps."""
    episodes: int = _number(16, 1)
    """Random episodes of each step."""
    learning_rate: float = _number(5e-3, 0, above=True)
    """Of AdamW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """The loss of RL."""

    name: ObjectiveName = "grpo"
    """Which policy gradient."""
    clip_low: float | None = _number(None, 0, above=True, maximum=1)
    """The probability ratio counts down to 1 - clip_low; None for the objective's usual bound."""
    clip_high: float | None = _number(None, 0, above=True)
    """The probability ratio counts up to 1 + clip_high; None for the objective's usual bound."""
    kl_coef: float = _number(0.01, 0)
    """Weight of the k3 estimate of the divergence from the warm-started policy."""
    entropy_coef: float = _number(0.0, 0)
    """Weight of the entropy bonus."""
    normalization: Literal["token", "sequence", "group"] | None = None
    """What the loss is a mean over; None for what the objective usually takes."""
    scale_by_std: bool = True
    """Whether advantages are divided by the standard deviation of their group's rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW in RL."""

    learning_rate: float = _number(1e-3, 0, above=True)
    """After the warm-up."""
    warmup_steps: int = _number(5, 0)
    """Steps over which the learning rate rises linearly, at the start of the warm start and of RL."""
    weight_decay: float = _number(0.0, 0)
    """Decoupled weight decay."""
    max_grad_norm: float = _number(1.0, 0, above=True)
    """Gradients are scaled down to this norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """How long, and what is kept and checked on the way."""

    steps: int = _number(200, 1)
    """RL steps."""
    check_every: int = _number(50, 0)
    """RL steps between comparisons of the tree step with the flat step; 0: never."""
    checkpoint_every: int = _number(10, 1)
    """Steps between checkpoints, those of the warm start included."""
    num_threads: int = _number(1, 1)
    """Threads of PyTorch. Tensors this small gain little from more, and the number decides the last bits of sums, so
    it is part of the run rather than of the machine."""
    max_tokens_per_microbatch: int = _number(16384, 1)
    """Distinct tokens of a microbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """All settings of a run.

    Example:
        >>> config = load_config(None, ["seed=3", "rollout.siblings=16"])
        >>> config.seed, config.rollout.siblings
        (3, 16)
    """

    seed: int = _number(0, 0, maximum=2**31 - 1)
    """Fixes the weights, the games and every draw."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """What is played."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """What precedes RL."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """The loss."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The update."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, checks, checkpoints."""

    def __post_init__(self) -> None:
        if self.model.width % 32:
            raise ValueError(f"model.width is {self.model.width}, expected a multiple of 32 (the width of a head).")
        if self.rollout.branch_at is not None and self.rollout.siblings % 2:
            raise ValueError(
                f"rollout.siblings is {self.rollout.siblings}, expected an even number with rollout.branch_at: "
                "each episode becomes two. Make it even, or leave rollout.branch_at out."
            )


def load_config(file: Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read settings: the defaults, then a file, then overrides.

    Args:
        file: YAML with the fields of `TrainConfig`, any of them left out; None for the defaults.
        overrides: `key=value` with dotted keys, the values written as in YAML.

    Returns:
        The checked settings.

    Raises:
        ValueError: If the file cannot be read, a key does not exist, or a value has the wrong type or is out of range.
    """
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_flatten(_read_yaml(file), prefix=""))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"Got the override '{override}', expected key=value, for example run.steps=50.")
        values[key.strip()] = _parse_yaml(text, where=f"The value of '{key.strip()}'")
    for key in values:
        _check_known(key)
    return _build(TrainConfig, values, prefix="")


def dump_config(config: TrainConfig) -> str:
    """The settings as YAML that `load_config` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def _read_yaml(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise ValueError(f"The config file '{file}' does not exist.")
    content = _parse_yaml(file.read_text(encoding="utf-8"), where=f"The config file '{file}'")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"The config file '{file}' holds a {type(content).__name__}, expected keys and values.")
    return content


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error


def _flatten(tree: Mapping[str, Any], *, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _flatten(value, prefix=f"{key}.")
        else:
            yield key, value


def _keys(config_type: type, *, prefix: str = "") -> Iterator[str]:
    for name, hint in typing.get_type_hints(config_type).items():
        if dataclasses.is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _check_known(key: str) -> None:
    known = list(_keys(TrainConfig))
    if key in known:
        return
    inside = [name for name in known if name.startswith(f"{key}.")]
    if inside:
        raise ValueError(f"'{key}' is a group of settings, expected one of them: {', '.join(inside)}.")
    # Compare the last part too, so that `steps` finds `run.steps`.
    leaf = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == leaf] or difflib.get_close_matches(key, known, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"The keys are: {', '.join(known)}."
    raise ValueError(f"Unknown key '{key}'. {hint}")


def _build(config_type: type, values: Mapping[str, Any], *, prefix: str) -> Any:
    hints = typing.get_type_hints(config_type)
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(config_type):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(hint):
            arguments[item.name] = _build(typing.cast(type, hint), values, prefix=f"{key}.")
        elif key in values:
            arguments[item.name] = _convert(key, values[key], hint, item.metadata)
    return config_type(**arguments)


def _convert(key: str, value: Any, hint: Any, bounds: Mapping[str, Any]) -> Any:
    none = " or null" if _is_optional(hint) else ""
    if none:
        if value is None:
            return None
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            suggestion = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"{key} is {value!r}, expected one of {', '.join(choices)}{none}.{suggestion}")
        return value
    number = _as_kind(value, hint)
    if number is None:
        names = {int: "an integer", float: "a number", bool: "true or false"}
        raise ValueError(f"{key} is {value!r}, expected {names[hint]}{none}.")
    _check_range(key, number, bounds)
    return number


def _is_optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _as_kind(value: Any, kind: type) -> Any:
    """The value as `kind`, or None if it is of another type."""
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else None
    if kind is int:
        return value if isinstance(value, int) else None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-3 (no dot) as text.
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) else None


def _check_range(key: str, number: float, bounds: Mapping[str, Any]) -> None:
    if not bounds:
        return
    minimum, maximum = bounds["minimum"], bounds["maximum"]
    too_low = number <= minimum if bounds["above"] else number < minimum
    if not math.isfinite(number) or too_low or number > maximum:
        lower = f"{'>' if bounds['above'] else '>='} {minimum:g}"
        upper = "" if maximum == math.inf else f" and <= {maximum:g}"
        raise ValueError(f"{key} is {number}, expected a finite number {lower}{upper}.")
