"""Jamba: Mamba1 and full attention without positions, with mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.jamba import modeling_jamba as hf

from harts.layers.linear_attention.selective_scan import CHUNK_SIZE, SelectiveScanInputs, tree_selective_scan
from harts.layers.short_conv.packed import packed_short_conv
from harts.layout.packed import LayoutNeeds, PackedLayout
from harts.models.family import TINY, Family, Mixers
from harts.models.routers import PLAIN_SOFTMAX


class TreeJambaMambaMixer(hf.JambaMambaMixer):
    """The layer on a layout; without one, transformers' own."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        convolution, state_size = self.conv1d, self.ssm_state_size
        mixed_TD, gate_TD = self.in_proj(hidden_states[0]).chunk(2, dim=-1)
        x_TD = self.act(packed_short_conv(mixed_TD, convolution.weight.squeeze(1), convolution.bias, harts_layout))
        step, key, query = self.x_proj(x_TD).split([self.dt_proj.in_features, state_size, state_size], dim=-1)
        # The weight and not the layer: transformers leaves out adapters on this projection too.
        step_TD = F.linear(self.dt_layernorm(step), self.dt_proj.weight)
        # The bias and softplus act in the model's dtype, as they do in transformers.
        step_TD = F.softplus(step_TD + self.dt_proj.bias.to(step_TD.dtype))
        compute = torch.promote_types(hidden_states.dtype, torch.float32)
        inputs = SelectiveScanInputs(
            value=x_TD.to(compute),
            step=step_TD.to(compute),
            key=self.b_layernorm(key).to(compute),
            query=self.c_layernorm(query).to(compute),
            rate=-self.A_log.to(compute).exp(),
        )
        output_TD = tree_selective_scan(inputs, harts_layout.chunks) + x_TD * self.D.to(compute)
        return self.out_proj((output_TD * F.silu(gate_TD)).to(hidden_states.dtype))[None]


class TreeJambaMambaDecoderLayer(hf.JambaMambaDecoderLayer):
    """Hands the layout to its mixer, which transformers' own does not."""

    def forward(
        self, hidden_states: Tensor, *args: Any, harts_layout: PackedLayout | None = None, **options: Any
    ) -> Tensor:
        """[1, T, D] to [1, T, D]."""
        if harts_layout is None:
            return super().forward(hidden_states, *args, **options)
        mixed = self.mamba(self.input_layernorm(hidden_states), harts_layout=harts_layout)
        hidden_states = hidden_states + mixed
        return hidden_states + self.feed_forward(self.pre_ff_layernorm(hidden_states))


# Older versions of transformers have a plain linear layer instead.
ROUTERS: list[type[nn.Module]] = [cls for name, cls in vars(hf).items() if name == "JambaTopKRouter"]

FAMILY = Family(
    causal_lm=hf.JambaForCausalLM,
    layer_kinds=("Mamba1", "attention (no positions)", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention"}),
    tree_classes={
        hf.JambaMambaMixer: TreeJambaMambaMixer,
        hf.JambaMambaDecoderLayer: TreeJambaMambaDecoderLayer,
    },
    attention_classes=frozenset({hf.JambaAttention}),
    token_wise_classes=frozenset(
        {
            hf.JambaModel,
            hf.JambaAttentionDecoderLayer,
            hf.JambaMLP,
            hf.JambaSparseMoeBlock,
            hf.JambaExperts,
            hf.JambaRMSNorm,
            *ROUTERS,
        }
    ),
    routers={"JambaTopKRouter": PLAIN_SOFTMAX},
    layout_needs=lambda config: LayoutNeeds(chunk_size=CHUNK_SIZE, conv_width=config.mamba_d_conv),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.layer_types.count("full_attention"),
        attention_width=config.hidden_size,
        num_linear_layers=config.layer_types.count("linear_attention"),
        # Every channel has a state of its own, of one column.
        linear_heads=config.mamba_expand * config.hidden_size,
        linear_key_dim=config.mamba_d_state,
        linear_value_dim=1,
    ),
    active_experts=lambda config: (
        config.num_experts_per_tok / config.num_experts if max(config.layers_num_experts) > 1 else 1.0
    ),
    tiny={
        **TINY,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        # One by one: the grouped kernels of transformers know no float64.
        "experts_implementation": "eager",
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
    },
)
