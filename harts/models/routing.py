"""Routers of a prepared model: what binds them to the microbatch that runs, and their expert biases.

A router receives hidden states only. The decoder layer around it receives the keywords of the model's forward, in the
first forward and in the one that activation checkpointing repeats; its class binds the microbatch's recorder for as
long as it runs, on the thread that runs it, and a hook on the router asks for it. Nothing is bound without that
keyword, and a router without a recorder does what it always did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from harts.data import TrajectoryBatch
from harts.layers.moe.losses import RouterLosses, StepShare
from harts.layers.moe.recorder import RouterRecorder
from harts.layers.moe.scores import Scores
from harts.layers.moe.statistics import RouterStatistics
from harts.layout.flat import FlatLayout
from harts.layout.packed import PackedLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class Router:
    """What a family states about a class of routers, whose outputs are logits, combine weights and chosen experts."""

    scores: Scores
    """What its load-balancing losses take for probabilities."""
    weights: Callable[[Any, Tensor, Tensor], Tensor]
    """Combine weights [T, A] of given experts: from the router, its logits [T, X] and the experts [T, A]."""
    bias: Callable[[Any], Tensor] | None = None
    """The correction bias [X] that only the choice sees, from the block around the router; None if it has none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RouterSite:
    """A router in a model."""

    name: str
    """Module name."""
    block: nn.Module
    """Module around it."""
    kind: Router
    """What its family states."""
    num_experts: int
    """X."""
    num_active: int
    """A."""


class StepColumns(Protocol):
    """What losses of routers divide by: a `TrajectoryBatch`, or what a rank knows of a step that lies on several."""

    @property
    def length_N(self) -> NDArray[np.int64]:
        """[N] int64. Tokens of each trajectory of the step."""
        ...

    @property
    def weight_N(self) -> NDArray[np.float64]:
        """[N] float64, >= 0."""
        ...


class Binding:
    """The recorder that each thread's layers run under."""

    def __init__(self) -> None:
        self._bound: dict[int, RouterRecorder] = {}

    def current(self) -> RouterRecorder | None:
        """The recorder of the layer that this thread runs."""
        return self._bound.get(threading.get_ident())

    @contextmanager
    def to(self, recorder: RouterRecorder) -> Iterator[None]:
        """Bind for the duration of a layer's forward."""
        self._bound[threading.get_ident()] = recorder
        try:
            yield
        finally:
            del self._bound[threading.get_ident()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoundRecorder:
    """The keyword `harts_router` of a forward."""

    recorder: RouterRecorder
    """Of the microbatch."""
    binding: Binding
    """Of the model."""


class RoutedLayer:
    """Mixed into decoder layers: binds the recorder of the forward to the routers inside."""

    def forward(self, *args: Any, harts_router: BoundRecorder | None = None, **options: Any) -> Any:
        """The layer's own forward."""
        if harts_router is None:
            return super().forward(*args, **options)  # type: ignore[misc]
        with harts_router.binding.to(harts_router.recorder):
            return super().forward(*args, **options)  # type: ignore[misc]


@cache
def routed_class(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of a decoder layer that binds recorders."""
    return type(f"Routed{layer.__name__}", (RoutedLayer, layer), {"__module__": __name__})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """All routers of a prepared model."""

    sites: tuple[RouterSite, ...]
    """In the order of the layers."""
    binding: Binding
    """Shared by them."""
    handles: tuple[RemovableHandle, ...]
    """Of the hooks on them."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the routers."""
        return tuple(site.name for site in self.sites)

    def check_routes(self, batch: TrajectoryBatch) -> None:
        """Raise a ValueError if recorded routes are not choices of these routers."""
        if batch.routes_FMA is None:
            return
        expected = (len(self.sites), self.sites[0].num_active if self.sites else 0)
        _, num_layers, num_active = batch.routes_FMA.shape
        if (num_layers, num_active) != expected:
            raise ValueError(
                f"Got routes of {num_layers} layers and {num_active} experts a token, expected {expected[0]} and "
                f"{expected[1]} for the model's routers. Record them from this model, every router in its order."
            )
        highest = batch.routes_FMA.max()
        if highest >= self.sites[0].num_experts:
            raise ValueError(
                f"Got a route to expert {highest}, but the model has {self.sites[0].num_experts}. "
                "Record routes from this model."
            )

    def recorder(
        self,
        layout: PackedLayout | FlatLayout,
        whole: StepColumns,
        losses: RouterLosses | None = None,
        *,
        keep_choices: bool = False,
    ) -> RouterRecorder | None:
        """For one microbatch.

        Args:
            layout: The microbatch.
            whole: The whole step, of which it is a part.
            losses: What to count and add; None for nothing.
            keep_choices: Whether the recorder's `choices` is asked for.

        Returns:
            None if the routers have nothing to do but route.
        """
        if losses is None and layout.routes_TMA is None:
            return None
        losses = RouterLosses() if losses is None else losses
        count_N = whole.weight_N if losses.count_weights else np.ones_like(whole.weight_N)
        share = StepShare.of(
            layout.paths,
            count_weights=losses.count_weights,
            num_step_tokens=float((count_N * whole.length_N).sum()),
            num_step_trajectories=float(count_N.sum()),
        )
        return RouterRecorder(self.layers, losses, share=share, given_TMA=layout.routes_TMA, keep_choices=keep_choices)

    def total(self, parts: Iterable[RouterStatistics]) -> RouterStatistics:
        """The sum over some microbatches; zeros without any."""
        load_MX = np.zeros((len(self.sites), self.sites[0].num_experts))
        return sum(parts, start=RouterStatistics(layers=self.layers, load_MX=load_MX, num_tokens=0.0))

    def bound(self, recorder: RouterRecorder) -> BoundRecorder:
        """What the model's forward takes as `harts_router`."""
        return BoundRecorder(recorder=recorder, binding=self.binding)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.handles:
            handle.remove()


def attach(model: PreTrainedModel, routers: Mapping[str, Router]) -> Routing:
    """Hook the routers of a model.

    Args:
        model: Whose decoder layers are, or are to be, of routed classes.
        routers: Name of a router's class -> what its family states.
    """
    binding, sites, handles = Binding(), [], []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if type(module).__name__ in routers:
            kind = routers[type(module).__name__]
            handles.append(module.register_forward_hook(_hook(len(sites), kind, binding)))
            sites.append(
                RouterSite(
                    name=name,
                    block=modules[name.rpartition(".")[0]],
                    kind=kind,
                    num_experts=module.get_parameter("weight").shape[0],
                    num_active=model.config.num_experts_per_tok,
                )
            )
    return Routing(sites=tuple(sites), binding=binding, handles=tuple(handles))


def _hook(layer: int, kind: Router, binding: Binding) -> Callable[[nn.Module, Any, Any], Any]:
    def route(router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        recorder = binding.current()
        if recorder is None:
            return None
        # Granite's routers return the experts first in older versions of transformers (5.17), weights between in all.
        experts_first = not output[0].is_floating_point()
        logits_TX, weight_TA, expert_TA = output[::-1] if experts_first else output
        given_TA = recorder.given(layer)
        if given_TA is not None:
            expert_TA = torch.where(given_TA < 0, expert_TA, given_TA)
            weight_TA = kind.weights(router, logits_TX, expert_TA).to(weight_TA.dtype)
        weight_TA = recorder.record(layer, kind.scores, logits_TX, weight_TA, expert_TA)
        routed = (logits_TX, weight_TA, expert_TA)
        return routed[::-1] if experts_first else routed

    # Compiled blocks would otherwise keep the recorder that they were traced with.
    disabled: Callable[[nn.Module, Any, Any], Any] = torch.compiler.disable(route)  # type: ignore[assignment]
    return disabled
