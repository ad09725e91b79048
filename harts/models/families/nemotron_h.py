"""Nemotron-H: Mamba2, full attention without positions, MLPs and mixtures of experts, one of them a layer."""

from __future__ import annotations

from torch import nn
from transformers.models.nemotron_h import modeling_nemotron_h as hf

from harts.layout.packed import LayoutNeeds
from harts.models.family import TINY, Family, Mixers
from harts.models.routers import GROUPED_SIGMOID
from harts.models.shared_layers import TreeMamba2


class TreeNemotronHMamba2Mixer(TreeMamba2, hf.NemotronHMamba2Mixer):
    """On a layout, too."""


# A decorator hides the type of the experts; older versions of transformers take the gated norm from Zamba2.
BY_NAME: list[type[nn.Module]] = [
    cls for name, cls in vars(hf).items() if name in {"NemotronHExperts", "NemotronHRMSNormGated", "Zamba2RMSNormGated"}
]

FAMILY = Family(
    causal_lm=hf.NemotronHForCausalLM,
    layer_kinds=("Mamba2", "attention (no positions)", "MLP", "MoE"),
    layer_types=frozenset({"full_attention", "linear_attention", "mlp", "moe"}),
    tree_classes={hf.NemotronHMamba2Mixer: TreeNemotronHMamba2Mixer},
    attention_classes=frozenset({hf.NemotronHAttention}),
    token_wise_classes=frozenset(
        {
            hf.NemotronHModel,
            hf.NemotronHBlock,
            hf.NemotronHMLP,
            hf.NemotronHMoE,
            hf.NemotronHTopkRouter,
            hf.NemotronHRMSNorm,
            *BY_NAME,
        }
    ),
    routers={"NemotronHTopkRouter": GROUPED_SIGMOID},
    layout_needs=lambda config: LayoutNeeds(chunk_size=config.chunk_size, conv_width=config.conv_kernel),
    mixers=lambda config: Mixers(
        num_full_attention_layers=config.layer_types.count("full_attention"),
        attention_width=config.num_attention_heads * config.head_dim,
        num_linear_layers=config.layer_types.count("linear_attention"),
        linear_heads=config.mamba_num_heads,
        linear_key_dim=config.ssm_state_size,
        linear_value_dim=config.mamba_head_dim,
    ),
    active_experts=lambda config: (
        config.num_experts_per_tok / config.n_routed_experts if "moe" in config.layer_types else 1.0
    ),
    tiny={
        **TINY,
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 64,
        # Steps of some tokens are at the limit.
        "time_step_min": 0.05,
        "time_step_max": 2.0,
        "n_routed_experts": 6,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 20,
        # One by one: the grouped kernels of transformers know no float64.
        "experts_implementation": "eager",
    },
)
