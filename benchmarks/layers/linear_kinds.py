"""Kinds of linear attention that are timed: their streams, and their executions."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla
from torch import Tensor

from harts.layers.linear_attention.by_rounds import PublicKernel, linear_attention_by_rounds
from harts.layers.linear_attention.fla_delta_rule import tree_delta_rule
from harts.layers.linear_attention.fla_simple_gla import tree_simple_gla
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.ssd import SSDInputs
from harts.layout.launch import LaunchIndex
from harts.layout.rounds import RunPlan

Streams = dict[str, Tensor]
Before = Literal["convolution", "activation", "nothing"]
CHUNK_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of linear attention, with the sizes of a model's layer."""

    streams: Callable[[int], Streams]
    """Given a number of tokens."""
    tree: Callable[[Streams, LaunchIndex], Tensor]
    """Ours, on rows in run order."""
    public: Callable[..., Tensor]
    """fla's public function, with `cu_seqlens` or for one sequence."""
    rounds: Callable[[Streams, RunPlan], Tensor] | None = None
    """The public function called once a round; None if it is not timed."""
    public_gradient: bool = True
    """False where fla refuses the gradient on Hopper with some Triton; then ours without branches is the floor."""
    constant: tuple[str, ...] = ()
    """Streams that are not of tokens."""
    before: Before = "convolution"
    """What layers of it do with projected queries, keys and values."""


def _bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _delta_streams(num_tokens: int, *, heads: int, value_heads: int, channels: int) -> Streams:
    gate = (num_tokens, value_heads, channels) if channels else (num_tokens, value_heads)
    return {
        "q": _bf16(num_tokens, heads, 128),
        "k": _bf16(num_tokens, heads, 128),
        "v": _bf16(num_tokens, value_heads, 128),
        "g": -(torch.rand(gate, device="cuda") ** 3),
        "beta": _bf16(num_tokens, value_heads).sigmoid(),
    }


def _delta_tree(streams: Streams, launch: LaunchIndex, *, bounded: bool) -> Tensor:
    q, k, v, g, beta = streams.values()
    inputs = GatedDeltaInputs(query=q, key=k, value=v, decay=g, beta=beta)
    return tree_delta_rule(inputs, launch, bounded_decay=bounded)


def _public(function: Callable[..., Any], streams: Streams, cu_seqlens: Tensor | None = None, **options: Any) -> Tensor:
    return function(**{name: x[None] for name, x in streams.items()}, cu_seqlens=cu_seqlens, **options)[0][0]


def _delta_rounds(streams: Streams, runs: RunPlan, *, function: Callable[..., Any]) -> Tensor:
    q, k, v, g, beta = streams.values()
    kernel: PublicKernel[GatedDeltaInputs] = PublicKernel(
        function=partial(function, use_qk_l2norm_in_kernel=True, output_final_state=True),
        arguments=lambda x: {"q": x.query, "k": x.key, "v": x.value, "g": x.decay, "beta": x.beta},
        chunk_size=CHUNK_SIZE,
    )
    zero = torch.zeros(v.shape[1], k.shape[2], v.shape[2], device="cuda")
    inputs = GatedDeltaInputs(query=q, key=k, value=v, decay=g, beta=beta)
    return linear_attention_by_rounds(inputs, runs, kernel, zero_state=zero)


def _decay_streams(num_tokens: int, *, groups: int, heads: int, value_width: int, constant: bool) -> Streams:
    return {
        "q": _bf16(num_tokens, groups, 128),
        "k": _bf16(num_tokens, groups, 128),
        "v": _bf16(num_tokens, heads, value_width),
        "g": -torch.rand(*(() if constant else (num_tokens,)), heads, device="cuda"),
    }


def _decay_tree(streams: Streams, launch: LaunchIndex) -> Tensor:
    q, k, v, g = streams.values()
    return tree_simple_gla(SSDInputs(query=q, key=k, value=v, decay=g), launch)


def _decay_public(streams: Streams, cu_seqlens: Tensor | None = None) -> Tensor:
    q, k, v, g = streams.values()
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    named = {"q": q, "k": k, "v": v}
    if g.dim() == 1:
        return _public(chunk_simple_gla, named, cu_seqlens, scale=1.0, g_gamma=g)
    return _public(chunk_simple_gla, {**named, "g": g}, cu_seqlens, scale=1.0)


def _delta(function: Callable[..., Any], *, bounded: bool | None, heads: int, channels: int) -> Kind:
    options = {} if bounded is None else {"safe_gate": bounded}
    return Kind(
        streams=partial(_delta_streams, heads=heads, value_heads=32, channels=channels),
        tree=partial(_delta_tree, bounded=bool(bounded)),
        public=partial(_public, function, use_qk_l2norm_in_kernel=True, **options),
        rounds=partial(_delta_rounds, function=partial(function, **options)),
    )


def _decays(*, groups: int, heads: int, value_width: int, before: Before) -> Kind:
    constant = before == "activation"
    return Kind(
        streams=partial(_decay_streams, groups=groups, heads=heads, value_width=value_width, constant=constant),
        tree=_decay_tree,
        public=_decay_public,
        public_gradient=constant,
        constant=("g",) if constant else (),
        before=before,
    )


KINDS = {
    "gdn": _delta(chunk_gated_delta_rule, bounded=None, heads=16, channels=0),
    "kda": _delta(chunk_kda, bounded=False, heads=32, channels=128),
    "kda-bounded": _delta(chunk_kda, bounded=True, heads=32, channels=128),
    "lightning": _decays(groups=32, heads=32, value_width=128, before="activation"),
    "simple-gla": _decays(groups=32, heads=32, value_width=128, before="nothing"),
    "ssd": _decays(groups=8, heads=64, value_width=64, before="convolution"),
}
