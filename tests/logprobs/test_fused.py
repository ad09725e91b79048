"""The GPU path of the LM head without a GPU: what it computes, and that its kernels compile."""

from __future__ import annotations

import pytest

from tests.triton_checks import compiled_for_h200, run_interpreted


@pytest.mark.parametrize("marker", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_float32_in_the_interpreter(marker: str):
    run_interpreted("tests/logprobs/interpreted_fused.py", marker=marker)


@pytest.mark.parametrize("with_entropy", [True, False])
def test_kernels_compile_without_spills(with_entropy: bool):
    pytest.importorskip("triton")
    from harts.logprobs import kernels

    statistics = compiled_for_h200(
        kernels.softmax_statistics_kernel, {"WITH_ENTROPY": with_entropy, "LANES": 512, "WIDTH": 8}, num_warps=8
    )
    gradient = compiled_for_h200(
        kernels.logits_gradient_kernel, {"WITH_ENTROPY": with_entropy, "ROWS": 4, "COLUMNS": 1024}, num_warps=4
    )
    for kernel in (statistics, gradient):
        assert kernel.spilled_bytes == 0
        assert kernel.registers <= 80, "24 warps on a multiprocessor"
        assert kernel.has("ld.global.v4.b32"), "logits are read 16 bytes at a time"
