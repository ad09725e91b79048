"""When fla runs linear attention, and what the message says when it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harts.data import TrajectoryBatch
from harts.layers.linear_attention.choice import LinearNeeds, against_fla, linear_kernel
from harts.layout.kernels import Kernels
from harts.layout.packed import LayoutNeeds, PackedLayout, pack
from harts.tree import build_prefix_tree
from tests.cases import CASES, trajectories_of

HOPPER = (9, 0)
INSTALLED = "0.6.0"
NEEDS = LinearNeeds(device=torch.device("cuda"), dtype=torch.bfloat16, widths=(128, 128))


def test_runs_where_all_is_there() -> None:
    assert against_fla(NEEDS, HOPPER, INSTALLED) is None


@pytest.mark.parametrize(
    ("needs", "capability", "fla", "message"),
    [
        (NEEDS, None, INSTALLED, "Move the model to a GPU"),
        (NEEDS, HOPPER, None, "none is installed"),
        (NEEDS, HOPPER, "0.7.1", "0.7.1 is installed"),
        (NEEDS, HOPPER, "0.60.0", "0.60.0 is installed"),
        (replace(NEEDS, dtype=torch.float32), HOPPER, INSTALLED, "float32"),
        (replace(NEEDS, widths=(512, 128)), HOPPER, INSTALLED, "up to 256"),
        (replace(NEEDS, widths=(128, 100)), HOPPER, INSTALLED, "multiples of 16"),
        (replace(NEEDS, replay=False), HOPPER, INSTALLED, "replay=False"),
    ],
)
def test_obstacles(needs: LinearNeeds, capability: tuple[int, int], fla: str | None, message: str) -> None:
    obstacle = against_fla(needs, capability, fla)
    assert obstacle is not None and message in obstacle


def layout_for(kernels: Kernels) -> PackedLayout:
    batch = TrajectoryBatch.of(trajectories_of(CASES[0]))
    return pack(build_prefix_tree(batch), batch, LayoutNeeds(chunk_size=64, conv_width=4, kernels=kernels))


def test_a_cpu_runs_pytorch_or_says_why_not() -> None:
    x = torch.zeros(3, 4)
    assert linear_kernel(x, layout_for(Kernels()), widths=(128, 128)) == "torch"
    with pytest.raises(ValueError, match=r"fla was asked for linear attention but cannot run: .*Move the model"):
        linear_kernel(x, layout_for(Kernels(linear_attention="fla")), widths=(128, 128))


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no attention kernel 'flash5'. Choose one of flash4, flex, sdpa"):
        Kernels(attention="flash5")  # type: ignore[arg-type]
