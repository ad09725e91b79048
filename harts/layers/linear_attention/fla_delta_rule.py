"""Gated DeltaNet and Kimi Delta Attention of a whole tree, all runs as one packed call of each kernel.

fla's kernels are parallel over chunks and do not ask which chunk comes before which, all but the two that hand states
over. Its functions are taken apart here: states follow the tree (`kernels/delta_rule.py`), and gradients inside chunks
are ours too (`chunk_gradients.py` and `wy_gradients.py` of Gated DeltaNet, `channel_gradients.py` and
`pair_gradients.py` of Kimi Delta Attention), which makes up for the additional chunks of a tree. All else that outputs
depend on is fla's: they have its bits.

Imported only where fla is installed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from fla.modules.l2norm import l2norm_bwd, l2norm_fwd
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv
from fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd as recompute_channel_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2
from torch import Tensor

from harts.layers.linear_attention.fla_arguments import chunks_of, runs_of
from harts.layers.linear_attention.inputs import GatedDeltaInputs
from harts.layers.linear_attention.kernels.channel_gradients import ChannelRows, channel_gradients
from harts.layers.linear_attention.kernels.chunk_gradients import ChunkRows, ChunkStates, chunk_gradients
from harts.layers.linear_attention.kernels.delta_rule import DeltaRuleRows, tree_state_gradients, tree_states
from harts.layers.linear_attention.kernels.pair_gradients import pair_gradients
from harts.layers.linear_attention.kernels.wy_gradients import WYRows, wy_gradients
from harts.layout.launch import LaunchIndex


def tree_delta_rule(inputs: GatedDeltaInputs, launch: LaunchIndex, *, bounded_decay: bool = False) -> Tensor:
    """The gated delta rule along every path, with one decay a head or one a key channel, on rows in run order.

    Args:
        inputs: R rows, on the device: queries and keys [R, H, K] as projected, neither normalised nor scaled, in 16
            bits; values [R, HV, V], HV a multiple of H; decay [R, HV] or [R, HV, K] float32; beta [R, HV].
        launch: Of the same rows.
        bounded_decay: Whether no decay is below -5: Kimi Delta Attention then multiplies inside chunks faster, forward.

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
        q, k, v, g, beta = rows
        (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
        chunks = chunks_of(launch)
        g = chunk_local_cumsum(g, scale=RCP_LN2, **chunks)
        w, u, inverse = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=g, beta=beta, **chunks)
        h, written = tree_states(DeltaRuleRows(k=k, w=w, g=g, gk=None), u, launch=launch)
        output = chunk_fwd_o(q=q, k=k, v=written, h=h, g=g, scale=k.shape[-1] ** -0.5, **chunks)
        ctx.launch = launch
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, q_rstd, k, k_rstd, v, g, beta, inverse = ctx.saved_tensors
        launch, do, scale = ctx.launch, grad_outputs[0].contiguous(), k.shape[-1] ** -0.5
        chunks = chunks_of(launch)
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=g, **runs_of(launch))
        states = DeltaRuleRows(k=k, w=w, g=g, gk=None)
        h, written = tree_states(states, u, launch=launch)
        dv = chunk_bwd_dv_local(q=q, k=k, g=g, do=do, scale=scale, **chunks)
        dh, du = tree_state_gradients(states, q, do, dv, scale=scale, launch=launch)
        rows = ChunkRows(q=q, k=k, v=written, g=g, do=do, dv=du)
        dq, dk, dw, dg = chunk_gradients(rows, ChunkStates(h=h, dh=dh), scale=scale, launch=launch)
        assert dw is not None, "rows with gradients of written values have keys of the WY form"
        wy = WYRows(k=k, v=v, beta=beta, g=g, inverse=inverse)
        dv, dbeta, dg_wy = wy_gradients(wy, dw, du, dk, launch=launch)
        dg = chunk_local_cumsum(dg.add_(dg_wy), reverse=True, **chunks)
        return None, l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk), dv, dg, dbeta


class _KimiDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: LaunchIndex, bounded_decay: bool, *rows: Tensor) -> Tensor:
        q, k, v, g, beta = rows
        (q, q_rstd), (k, k_rstd) = l2norm_fwd(q), l2norm_fwd(k)
        scale, chunks = k.shape[-1] ** -0.5, chunks_of(launch)
        g = chunk_local_cumsum(g, scale=RCP_LN2, **chunks)
        w, u, _, decayed_k, products, inverse = chunk_kda_fwd_intra(
            q=q, k=k, v=v, gk=g, beta=beta, scale=scale, safe_gate=bounded_decay, **chunks
        )
        h, written = tree_states(DeltaRuleRows(k=decayed_k, w=w, g=None, gk=g), u, launch=launch)
        output = chunk_gla_fwd_o_gk(q=q, v=written, g=g, A=products, h=h, scale=scale, **chunks)
        ctx.launch = launch
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, products, inverse)
        return output.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, q_rstd, k, k_rstd, v, g, beta, products, inverse = ctx.saved_tensors
        launch, do, scale = ctx.launch, grad_outputs[0].contiguous(), k.shape[-1] ** -0.5
        chunks = chunks_of(launch)
        w, u, decayed_q, decayed_k = recompute_channel_w_u_fwd(
            q=q, k=k, v=v, beta=beta, A=inverse, gk=g, **runs_of(launch)
        )
        states = DeltaRuleRows(k=decayed_k, w=w, g=None, gk=g)
        h, written = tree_states(states, u, launch=launch)
        da_q, dv = chunk_kda_bwd_dAv(q=q, k=k, v=written, do=do, A=products, scale=scale, **chunks)
        dh, du = tree_state_gradients(states, decayed_q, do, dv, scale=scale, launch=launch)
        rows = ChannelRows(q=q, k=k, v=v, written=written, g=g, beta=beta, inverse=inverse)
        found = channel_gradients(rows, do, du, ChunkStates(h=h, dh=dh), scale=scale, launch=launch)
        dq, dk, dbeta, dg = pair_gradients(rows, da_q, found, launch=launch)
        dg = chunk_local_cumsum(dg, reverse=True, **chunks)
        if v.shape[2] > q.shape[2]:
            dq, dk = (x.view(*q.shape[:3], -1, q.shape[3]).sum(3) for x in (dq, dk))
        dq, dk = l2norm_bwd(q, q_rstd, dq), l2norm_bwd(k, k_rstd, dk)
        return None, None, dq.to(q.dtype), dk.to(k.dtype), found.v, dg, dbeta.to(beta.dtype)
