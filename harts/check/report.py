"""From comparisons to a report: headline figures, and figures by kind of layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from harts.check.differences import Differences
from harts.check.recording import Recording
from harts.check.verdict import Compared, Verdict, judge, leaks, noise_of
from harts.data import TrajectoryBatch
from harts.tree import build_prefix_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """What was found of each layer that mixes tokens, by module name."""

    own: dict[str, float]
    """Tree against flat on equal inputs, see `differences_on_equal_inputs`."""
    own_noise: dict[str, float]
    """The same of flat in padded batches against flat."""
    moved: dict[str, float]
    """How much it moved in the leak test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """One kind of layer, the largest figure over its layers each."""

    name: str
    """Class in transformers."""
    count: int
    """Layers of it."""
    output: float
    """Tree against flat: relative difference of a token's output, see `differences.relative_rows`."""
    output_noise: float
    """Flat against itself, run again and in padded batches."""
    own: float
    """Tree against flat on flat's inputs: relative difference of a layer's outputs, which no layer before it caused."""
    own_noise: float
    """Flat in padded batches against flat, on the same inputs."""
    gradient: float
    """Tree against flat: relative difference of a parameter's gradient."""
    gradient_noise: float
    """Flat against itself."""
    leak: float
    """Relative change of a token's output when tokens of branches change that it does not follow."""
    leaks: bool
    """Whether that is more than rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What a check found."""

    verdict: Verdict
    """"exact" (float64 within 1e-10, or equal bit for bit), "within-noise", or "differs"."""
    dtype: str
    """Of the model."""
    tree: Differences
    """Tree against flat."""
    rerun: Differences
    """Flat against flat, run again."""
    repack: Differences
    """Flat in padded batches, in another order, against flat alone."""
    rounded: Differences | None
    """Flat with every weight moved by up to half a unit in its last place, against flat: what one more rounding does,
    as another order of summation would. None in 16 bits, where a weight's last place is far more than that."""
    tree_truth: Differences | None
    """Tree against the float64 model; None if that was not run."""
    flat_truth: Differences | None
    """Flat against the float64 model."""
    layer_kinds: tuple[LayerKind, ...]
    """Per kind of layer; token-wise parameters last, as "token-wise"."""
    leak: bool
    """Whether any branch felt another."""
    rounds: int
    """Rounds of linear attention for kernels that return final states only (model F); 0 without."""
    rounds_e: int
    """Rounds if kernels also returned the states inside runs (model E)."""
    replayed_tokens: int
    """Tokens whose linear-attention state update was repeated."""
    tokens_flat: int
    """Tokens of all trajectories."""
    tokens_distinct: int
    """Of the tree."""

    @property
    def passed(self) -> bool:
        """Whether trees may be used in place of trajectories."""
        return self.verdict != "differs"

    @property
    def routing_flips(self) -> dict[str, dict[str, int]]:
        """Router -> comparison -> tokens that went to other experts; empty without mixtures of experts."""
        if self.tree.routing is None:
            return {}
        found = {"tree": self.tree, "rerun": self.rerun, "repack": self.repack}
        return {
            router: {name: d.routing.flips[router] for name, d in found.items() if d.routing is not None}
            for router in self.tree.routing.flips
        }

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings for JSON: the headline first, then each comparison, kind of layer and parameter."""
        pairs = {
            name: getattr(self, name) for name in ("tree", "rerun", "repack", "rounded", "tree_truth", "flat_truth")
        }
        known = {name: pair for name, pair in pairs.items() if pair is not None}
        return {
            "verdict": self.verdict,
            "max_logprob_diff": self.tree.max_logprob,
            "max_grad_rel_diff": self.tree.max_gradient,
            "logit_cosine": self.tree.logit_cosine,
            "rounds": self.rounds,
            "rounds_e": self.rounds_e,
            "replayed_tokens": self.replayed_tokens,
            "leak": self.leak,
            "aux_loss_rel_diff": None if self.tree.routing is None else self.tree.routing.aux_loss,
            "load_count_diff": None if self.tree.routing is None else self.tree.routing.load_count,
            "dtype": self.dtype,
            "tokens_flat": self.tokens_flat,
            "tokens_distinct": self.tokens_distinct,
            **{name: pair.headline() for name, pair in known.items()},
            "layer_kinds": [asdict(kind) for kind in self.layer_kinds],
            "routing_flips": self.routing_flips,
            "gradients": {p: {n: pair.gradients[p] for n, pair in known.items()} for p in self.tree.gradients},
        }


def build_report(
    compared: Compared, tree: Recording, batch: TrajectoryBatch, kinds: dict[str, str], layers: LayerFigures
) -> CheckReport:
    """Sort figures by kind of layer and judge.

    Args:
        compared: All comparisons.
        tree: The tree's recording.
        batch: The trajectories.
        kinds: Module name -> kind, of the layers that mix tokens.
        layers: Of the layers by themselves.
    """
    noise = {name: max(d.layers[name] for d in compared.noise.values()) for name in compared.tree.layers}
    layer_kinds = tuple(_layer_kind(kind, compared, kinds, noise, layers) for kind in sorted(set(kinds.values())))
    layer_kinds += (_layer_kind(None, compared, kinds, noise, layers),)
    leak = any(kind.leaks for kind in layer_kinds)
    dtype = tree.hidden_FD.dtype
    verdict = "differs" if leak else judge(compared, is_float64=dtype is torch.float64)
    return CheckReport(
        verdict=verdict,
        dtype=str(dtype).removeprefix("torch."),
        tree=compared.tree,
        rerun=compared.noise["flat again"],
        repack=compared.noise["flat, padded"],
        rounded=compared.noise.get("flat, rounded"),
        tree_truth=compared.tree_truth,
        flat_truth=compared.flat_truth,
        layer_kinds=layer_kinds,
        leak=leak,
        rounds=tree.num_rounds,
        rounds_e=tree.num_rounds_e,
        replayed_tokens=tree.num_replayed,
        tokens_flat=batch.token_ids_F.size,
        tokens_distinct=build_prefix_tree(batch).num_tokens,
    )


def _layer_kind(
    kind: str | None, compared: Compared, kinds: dict[str, str], noise: dict[str, float], layers: LayerFigures
) -> LayerKind:
    """Figures of one kind of layer; None for the parameters that belong to no layer that mixes tokens."""
    names = [name for name in compared.tree.layers if kinds[name.partition("#")[0]] == kind]
    parameters = [p for p in compared.tree.gradients if _owner(p, kinds) == kind]
    return LayerKind(
        name=kind or "token-wise",
        count=len(names),
        output=max((compared.tree.layers[name] for name in names), default=0.0),
        output_noise=max((noise[name] for name in names), default=0.0),
        own=max((layers.own[name] for name in names), default=0.0),
        own_noise=max((layers.own_noise[name] for name in names), default=0.0),
        gradient=max((compared.tree.gradients[p] for p in parameters), default=0.0),
        gradient_noise=max((noise_of(compared, p) for p in parameters), default=0.0),
        leak=max((layers.moved[name] for name in names), default=0.0),
        leaks=any(leaks(layers.moved[name], noise[name], compared.eps) for name in names),
    )


def _owner(parameter: str, kinds: dict[str, str]) -> str | None:
    """The kind of mixing layer that a parameter belongs to."""
    return next((kind for name, kind in kinds.items() if parameter.startswith(f"{name}.")), None)
