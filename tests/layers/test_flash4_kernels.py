"""FlashAttention-4's kernels with parts of ours compile for Hopper, where the package is installed; no GPU is needed.

With CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_ARCH=sm_90 FLASH_ATTENTION_NUM_SMS=132:

    pytest -m slow tests/layers/test_flash4_kernels.py
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harts.layout.attention_blocks import attention_blocks

if os.environ.get("CUTE_DSL_ARCH") != "sm_90a":
    pytest.skip("what to compile for is read when the package is imported: see above", allow_module_level=True)
pytest.importorskip("flash_attn.cute")

PREFIX, BRANCH, BRANCHES = 512, 128, 3
TOKENS = PREFIX + BRANCH * BRANCHES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "heads", "window"),
    [
        ((64, 64), (8, 2), None),
        ((128, 128), (8, 2), None),
        ((128, 128), (5, 1), None),
        ((192, 128), (4, 4), None),
        ((256, 256), (4, 1), None),
        ((64, 64), (8, 2), 128),
        ((128, 128), (8, 2), 128),
        ((256, 256), (4, 1), 128),
    ],
)
def test_both_passes_compile(widths: tuple[int, int], heads: tuple[int, int], window: int | None):
    from harts.layers.tree_attention import flash4

    tiles = flash4.tiles_for(*widths)
    end = np.full(TOKENS, TOKENS)
    end[PREFIX:] = PREFIX + np.repeat(np.arange(1, BRANCHES + 1), BRANCH) * BRANCH
    position = np.concatenate([np.arange(PREFIX), np.tile(np.arange(PREFIX, PREFIX + BRANCH), BRANCHES)])
    sizes = {"forward_size": tiles.forward, "backward_size": tiles.backward_block}
    blocks = attention_blocks(end, position, **sizes, window=window)
    with FakeTensorMode(allow_non_fake_inputs=True):
        call = flash4.Flash4Call(blocks=on_gpu(blocks), scale=0.1, tiles=tiles)
        sizes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
        query, key, value = (torch.empty(1, TOKENS, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        context = SimpleNamespace(save_for_backward=lambda *saved: setattr(context, "saved_tensors", saved))
        output = flash4._TreeAttention.forward(context, call, query, key, value)
        gradients = flash4._TreeAttention.backward(context, torch.empty_like(output))
    assert output.shape == (1, TOKENS, heads[0], widths[1])
    assert [x.shape for x in gradients[1:4] if x is not None] == [query.shape, key.shape, value.shape]


def on_gpu(indices: Any) -> Any:
    """Index tensors as fake tensors of a GPU."""
    moved = {}
    for field in fields(indices):
        value = getattr(indices, field.name)
        if isinstance(value, Tensor):
            moved[field.name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
        elif field.name in ("forward", "backward"):
            moved[field.name] = on_gpu(value)
    return replace(indices, **moved)
