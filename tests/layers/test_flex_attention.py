"""FlexAttention compiled for a CPU, where it follows the block lists, against the definition. It has no backward."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from harts.data import TrajectoryBatch
from harts.layers.tree_attention import flex
from harts.layers.tree_attention.flex import BLOCK_SIZE, block_mask, tree_attention_flex
from harts.layers.tree_attention.reference import tree_attention_reference
from harts.layout.attention_blocks import attention_blocks
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.testing import assert_close
from harts.tree import build_prefix_tree
from tests.cases import CASES, RICH, Case, trajectories_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")


def layout_of(case: Case) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(case))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=None, conv_width=1))


def compare(case: Case, *, window: int | None, sinks: bool):
    layout = layout_of(case)
    end, position = layout.subtree_end_T.numpy(), layout.position_T.numpy()
    blocks = attention_blocks(end, position, forward_size=BLOCK_SIZE, backward_size=BLOCK_SIZE, window=window)
    query, key = torch.randn(4, layout.num_tokens, 16), torch.randn(2, layout.num_tokens, 16)
    value, sink = torch.randn(2, layout.num_tokens, 32), torch.randn(4) if sinks else None
    with torch.no_grad():
        actual = tree_attention_flex(query, key, value, mask=block_mask(blocks), scale=0.3, sink_H=sink)
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    expected = tree_attention_reference(
        query, key, value, parent_T=layout.parent_T, scale=0.3, window=window, sink_H=sink
    )
    assert_close("output", expected, actual, ratio=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_equals_the_definition(window: int | None):
    compare(RICH, window=window, sinks=False)


@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """Compiled for a CPU there is no log-sum-exp, which a sink needs."""
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    compare(RICH, window=window, sinks=True)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_cases(case: Case, window: int | None):
    compare(case, window=window, sinks=False)


@pytest.mark.slow
def test_lists_decide_what_is_computed():
    """A list that leaves out a block changes the output: the test above would notice a wrong list."""
    layout = layout_of(RICH)
    end, position = layout.subtree_end_T.numpy(), layout.position_T.numpy()
    blocks = attention_blocks(end, position, forward_size=BLOCK_SIZE, backward_size=BLOCK_SIZE)
    query, key, value = (torch.randn(2, layout.num_tokens, 16) for _ in range(3))
    mask = block_mask(blocks)
    with torch.no_grad():
        whole = tree_attention_flex(query, key, value, mask=mask, scale=0.3)
        mask.kv_num_blocks[0, 0, -1] -= 1
        assert not torch.equal(whole, tree_attention_flex(query, key, value, mask=mask, scale=0.3))


def test_other_block_sizes_are_refused():
    layout = layout_of(RICH)
    end, position = layout.subtree_end_T.numpy(), layout.position_T.numpy()
    with pytest.raises(ValueError, match="FlexAttention's are"):
        block_mask(attention_blocks(end, position, forward_size=(128, 64), backward_size=BLOCK_SIZE))
