"""Gated DeltaNet and Kimi Delta Attention of a whole tree as one call of fla.

All runs of a tree go into one packed call. fla's kernels are parallel over chunks and do not ask which chunk comes
before which, all but the two that hand states over. fla looks those up in a registry, where this module puts its own,
which follow the tree (`kernels/delta_rule.py`); calls without a tree go to fla's.

Imported only where fla is installed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from fla.backends import BaseBackend, register
from fla.modules.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from fla.ops.kda.chunk_bwd import chunk_kda_bwd
from fla.ops.kda.chunk_fwd import chunk_kda_fwd
from torch import Tensor

from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.kernels.delta_rule import (
    DeltaRuleRows,
    tree_state_gradients,
    tree_states,
)
from harts.layout.launch import LaunchIndex

_launch: ContextVar[LaunchIndex | None] = ContextVar("launch", default=None)
"""The tree of the call that runs; set only while one of fla's functions is on the stack."""


@contextmanager
def _along(launch: LaunchIndex) -> Iterator[None]:
    token = _launch.set(launch)
    try:
        yield
    finally:
        _launch.reset(token)


@register("common")
class TreeStates(BaseBackend):
    """States along a tree, in fla's registry of what its linear-attention functions share."""

    backend_type = "harts_tree"
    priority = -10  # before all of fla's
    env_var = None

    def verify(self, function_name: str, *args: Any, **options: Any) -> tuple[bool, str | None]:
        """Take what a tree needs, and only while one is being run."""
        ours = function_name in ("chunk_gated_delta_rule_fwd_h", "chunk_gated_delta_rule_bwd_dhu")
        return ours and _launch.get() is not None, "not along a tree"

    def chunk_gated_delta_rule_fwd_h(
        self, k: Tensor, w: Tensor, u: Tensor, g: Tensor | None = None, gk: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        """fla's signature; states before every chunk, written values, no final states."""
        launch = _current(options)
        rows = DeltaRuleRows(k=k, w=w, g=g, gk=gk)
        h, *values = tree_states(rows, u, launch=launch, save_values=options.get("save_new_value", True))
        return h, values[0] if values else None, None

    def chunk_gated_delta_rule_bwd_dhu(
        self, q: Tensor, k: Tensor, w: Tensor, do: Tensor, dv: Tensor, **options: Any
    ) -> tuple[Tensor, None, Tensor]:
        """fla's signature; gradients of the states after every chunk, none of initial states, of written values."""
        launch = _current(options)
        rows = DeltaRuleRows(k=k, w=w, g=options.get("g"), gk=options.get("gk"))
        dh, total_dv = tree_state_gradients(rows, q, do, dv, scale=options["scale"], launch=launch)
        return dh, None, total_dv


def _current(options: Mapping[str, Any]) -> LaunchIndex:
    launch = _launch.get()
    assert launch is not None and options["cu_seqlens"] is launch.cu_seqlens, "only calls of this module come here"
    for name in ("initial_state", "output_final_state", "state_v_first", "h0", "dht", "use_graph"):
        value = options.get(name)
        assert value is None or value is False, f"a tree starts from zero and ends nowhere, but fla passed {name}"
    return launch


def tree_delta_rule(inputs: GatedDeltaInputs, launch: LaunchIndex, *, bounded_decay: bool = False) -> Tensor:
    """The gated delta rule along every path, with one decay a head or one a key channel, on rows in run order.

    Args:
        inputs: R rows, on the device: queries and keys [R, H, K] as projected, neither normalised nor scaled, in 16
            bits; values [R, HV, V], HV a multiple of H; decay [R, HV] or [R, HV, K] float32; beta [R, HV].
        launch: Of the same rows.
        bounded_decay: Whether no decay is below -5, which lets Kimi Delta Attention multiply inside chunks faster.

    Returns:
        [R, HV, V] in the dtype of the queries. Rows that another row owns are computed too and take no gradient.
    """
    rows = [x.unsqueeze(0).contiguous() for x in (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)]
    if inputs.decay.dim() == inputs.key.dim():
        return _KimiDelta.apply(launch, bounded_decay, *rows).squeeze(0)
    return _GatedDelta.apply(launch, *rows).squeeze(0)


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: LaunchIndex, *rows: Tensor) -> Tensor:
        query, key, value, decay, beta = rows
        query, query_rstd = l2norm_fwd(query)
        key, key_rstd = l2norm_fwd(key)
        with _along(launch):
            decay, output, inverse, *_ = chunk_gated_delta_rule_fwd(
                q=query, k=key, v=value, g=decay, beta=beta, initial_state=None, output_final_state=False,
                **_options(launch, key),
            )  # fmt: skip
        ctx.launch = launch
        ctx.save_for_backward(query, query_rstd, key, key_rstd, value, decay, beta, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        query, query_rstd, key, key_rstd, value, decay, beta, inverse = ctx.saved_tensors
        with _along(ctx.launch):
            dq, dk, dv, db, dg, *_ = chunk_gated_delta_rule_bwd(
                q=query, k=key, v=value, g=decay, beta=beta, A=inverse, initial_state=None, do=grad.contiguous(),
                dht=None, **_options(ctx.launch, key),
            )  # fmt: skip
        dq, dk = l2norm_bwd(query, query_rstd, dq), l2norm_bwd(key, key_rstd, dk)
        return None, dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dg.to(decay.dtype), db.to(beta.dtype)


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: LaunchIndex, bounded_decay: bool, *rows: Tensor) -> Tensor:
        query, key, value, decay, beta = rows
        query, query_rstd = l2norm_fwd(query)
        key, key_rstd = l2norm_fwd(key)
        with _along(launch):
            output, _, decay, attention, inverse, *_ = chunk_kda_fwd(
                q=query, k=key, v=value, g=decay, beta=beta, initial_state=None, output_final_state=False,
                safe_gate=bounded_decay, **_options(launch, key),
            )  # fmt: skip
        ctx.launch, ctx.bounded_decay = launch, bounded_decay
        ctx.save_for_backward(query, query_rstd, key, key_rstd, value, decay, beta, attention, inverse)
        return output.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        query, query_rstd, key, key_rstd, value, decay, beta, attention, inverse = ctx.saved_tensors
        with _along(ctx.launch):
            dq, dk, dv, db, dg, *_ = chunk_kda_bwd(
                q=query, k=key, v=value, g=decay, beta=beta, Aqk=attention, Akk=inverse, initial_state=None,
                do=grad.contiguous(), dht=None, safe_gate=ctx.bounded_decay, **_options(ctx.launch, key),
            )  # fmt: skip
        dq, dk = l2norm_bwd(query, query_rstd, dq), l2norm_bwd(key, key_rstd, dk)
        gradients = (dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dg.to(decay.dtype), db.to(beta.dtype))
        return None, None, *gradients


def _options(launch: LaunchIndex, key: Tensor) -> dict[str, Any]:
    return {
        "scale": key.shape[-1] ** -0.5,
        "cu_seqlens": launch.cu_seqlens,
        "chunk_indices": launch.chunk_indices,
        "chunk_size": launch.chunk_size,
    }
