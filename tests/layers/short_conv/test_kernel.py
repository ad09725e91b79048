"""The GPU kernels of short convolution and row gathers without a GPU: what they compute, and that they compile."""

from __future__ import annotations

import pytest

from tests.triton_checks import compiled_for_h200, run_interpreted


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_float32_in_the_interpreter(marker: str):
    run_interpreted("tests/layers/short_conv/interpreted_kernel.py", marker=marker)


@pytest.mark.parametrize(("taps", "rounded"), [(4, True), (4, False), (8, True)])
def test_kernels_compile_without_spills(taps: int, rounded: bool):
    pytest.importorskip("triton")
    from harts.layers.short_conv import kernels
    from harts.layers.short_conv.kernel import BACKWARD_TILE, FORWARD_TILE

    shape = {
        **{"W0": 2048, "W1": 2048, "W2": 4096, "W3": 0},
        **{"TAPS": taps, "TABLE": taps, "SILU": True, "ROUNDED": rounded, "HAS_BIAS": True},
        "APPROXIMATE": True,
    }
    forward = compiled_for_h200(
        kernels.conv_forward_kernel,
        {**shape, "BLOCK_R": FORWARD_TILE.rows, "BLOCK_D": FORWARD_TILE.channels, "BLOCKS_D": 32},
        num_warps=FORWARD_TILE.warps,
    )
    assert forward.spilled_bytes == 0
    assert forward.has("ld.global.v4.b32"), "x is read 16 bytes at a time"
    assert forward.has("st.global.v4.b32")
    backward = compiled_for_h200(
        kernels.conv_backward_kernel,
        {
            **shape,
            "WEIGHT_GRADIENT": True,
            "BLOCK_T": BACKWARD_TILE.rows,
            "BLOCK_D": BACKWARD_TILE.channels,
            "BLOCKS_D": 32,
            "UNROLL": BACKWARD_TILE.unroll,
        },
        num_warps=BACKWARD_TILE.warps,
    )
    if taps == 4:
        assert backward.spilled_bytes == 0
        assert backward.registers <= 168, "six programs of two warps on a multiprocessor"
    branching = compiled_for_h200(kernels.branching_gradient_kernel, {"TAPS": taps, "BLOCK_D": 512}, num_warps=4)
    assert branching.spilled_bytes == 0


def test_row_kernels_compile_without_spills():
    pytest.importorskip("triton")
    from harts.layers import rows

    copy = compiled_for_h200(rows._copy_rows_kernel, {"ROWS": 32, "BLOCK": 128}, num_warps=4)
    assert copy.spilled_bytes == 0
    assert copy.has("ld.global.v4.b32")
    total = compiled_for_h200(rows._sum_shared_kernel, {"AT_TOKENS": True, "BLOCK": 512}, num_warps=4)
    assert total.spilled_bytes == 0
