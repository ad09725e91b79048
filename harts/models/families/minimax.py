"""MiniMax-Text-01: lightning attention between layers of full attention, and mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.minimax import modeling_minimax as hf

from harts.layers.activation import activation_of_kernel
from harts.layers.linear_attention.choice import linear_kernel
from harts.layers.linear_attention.lightning import LightningDecays, lightning_by_fla, tree_lightning_attention
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, Family, Mixers, head_width
from harts.models.routers import SOFTMAX


class TreeMiniMaxLightningAttention(hf.MiniMaxLightningAttention):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Any:
        """[1, T, D] to [1, T, D] and, without a layout, the state; transformers' own annotation says otherwise."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        hidden_TD = hidden_states[0]
        compute = torch.promote_types(hidden_TD.dtype, torch.float32)
        mixed_THM = self.qkv_proj(hidden_TD).unflatten(-1, (self.num_attention_heads, -1))
        if linear_kernel(hidden_TD, harts_layout, widths=(self.head_dim, self.head_dim)) == "fla":
            activation = activation_of_kernel(self.act_fn)
            mixed_THM = self.act_fn(mixed_THM) if activation == "none" else mixed_THM
            slope_H = self.slope_rate[:, 0, 0].float()
            output_THV = lightning_by_fla(mixed_THM, slope_H, harts_layout, activation=activation)
        else:
            query_THK, key_THK, value_THV = self.act_fn(mixed_THM).to(compute).split(self.head_dim, dim=-1)
            output_THV = tree_lightning_attention(
                query_THK, key_THK, value_THV, decays=self._decays(compute), chunks=harts_layout.chunks
            )
        output_TD = self.norm(output_THV.to(hidden_TD.dtype).flatten(-2))
        return self.out_proj(self.output_gate(hidden_TD).sigmoid() * output_TD)[None], None

    def _decays(self, dtype: torch.dtype) -> LightningDecays:
        return LightningDecays(
            slope_H=self.slope_rate[:, 0, 0].to(dtype),
            query_HC=self.query_decay[..., 0].to(dtype),
            key_HC=self.key_decay[..., 0].to(dtype),
            within_HCC=self.diagonal_decay[0].to(dtype),
        )


def _mixers(config: PreTrainedConfig) -> Mixers:
    num_attention, window = config.layer_types.count("full_attention"), config.sliding_window
    return Mixers(
        num_full_attention_layers=num_attention if window is None else 0,
        windows=() if window is None else (window,) * num_attention,
        attention_width=config.num_attention_heads * head_width(config),
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.num_attention_heads,
        linear_key_dim=head_width(config),
        linear_value_dim=head_width(config),
    )


FAMILY = Family(
    causal_lm=hf.MiniMaxForCausalLM,
    layer_kinds=("lightning attention", "attention", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={hf.MiniMaxLightningAttention: TreeMiniMaxLightningAttention},
    attention_classes=frozenset({hf.MiniMaxAttention}),
    token_wise_classes=frozenset(
        {
            hf.MiniMaxModel,
            hf.MiniMaxDecoderLayer,
            hf.MiniMaxSparseMoeBlock,
            hf.MiniMaxTopKRouter,
            hf.MiniMaxExperts,
            hf.MiniMaxRMSNorm,
            hf.MiniMaxRotaryEmbedding,
        }
    ),
    routers={"MiniMaxTopKRouter": SOFTMAX},
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.block_size, conv_width=1),
    mixers=_mixers,
    tiny={
        **TINY,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "block_size": 64,
        "intermediate_size": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
        "linear_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.8,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.7,
        "mlp_alpha_factor": 1.2,
        "mlp_beta_factor": 0.9,
    },
    active_experts=lambda config: config.num_experts_per_tok / config.num_local_experts,
)
