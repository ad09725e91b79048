"""The demo's policy: a small Qwen3.5 architecture with random weights."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from harts.config import ModelConfig

HEAD_WIDTH = 32
FULL_ATTENTION_INTERVAL = 4
MAX_POSITIONS = 4096
STEP_SIZES = (1e-3, 1e-1)


def random_policy(config: ModelConfig, *, vocab_size: int, seed: int) -> Qwen3_5ForCausalLM:
    """Build the policy in float32.

    Args:
        config: Layers and width.
        vocab_size: W, of the tokenizer.
        seed: Equal seeds give equal weights; the global random generator of torch is left as it was.

    Returns:
        A hybrid of linear attention and full attention, like Qwen3.5: every fourth layer, or the last of fewer, is
        full attention.
    """
    kinds = ["linear_attention"] * config.num_layers
    kinds[FULL_ATTENTION_INTERVAL - 1 :: FULL_ATTENTION_INTERVAL] = ["full_attention"] * (
        config.num_layers // FULL_ATTENTION_INTERVAL
    )
    if "full_attention" not in kinds:
        kinds[-1] = "full_attention"
    heads = config.width // HEAD_WIDTH
    architecture = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=config.width,
        intermediate_size=2 * config.width,
        num_hidden_layers=config.num_layers,
        layer_types=kinds,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD_WIDTH,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=HEAD_WIDTH,
        linear_value_head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_POSITIONS,
        # Wide enough that the context shows in the hidden states before anything is learned.
        initializer_range=config.width**-0.5,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3_5ForCausalLM(architecture).float().eval()
        _spread_memory(policy)
    return policy


@torch.no_grad()
def _spread_memory(policy: Qwen3_5ForCausalLM) -> None:
    """Draw step sizes so that heads remember from a few tokens to a thousand.

    The initialisation of Mamba-2 (arXiv 2405.21060) and Gated DeltaNet: step sizes even in the logarithm, through the
    inverse of softplus. The constant 1 that transformers leaves makes most heads forget at once.
    """
    shortest, longest = STEP_SIZES
    for module in policy.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            step_H = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(shortest), math.log(longest)))
            module.dt_bias.copy_(step_H + torch.log(-torch.expm1(-step_H)))


def load_policy(checkpoint: Path) -> Qwen3_5ForCausalLM:
    """The policy of a checkpoint, bit-equal to what was saved."""
    return Qwen3_5ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
