"""The state kernels of linear attention without a GPU: what they compute, and that they compile for an H200."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.triton_checks import assembled, run_interpreted

INTERPRETED = (
    "tests/layers/linear_attention/interpreted_states.py",
    "tests/layers/linear_attention/interpreted_channels.py",
    "tests/layers/linear_attention/interpreted_rows.py",
)
TYPES = {
    **dict.fromkeys(["g", "gk", "gamma", "states", "start_gradients", "dg", "da", "dbeta"], "*fp32"),
    **dict.fromkeys(["da_q", "da_k", "db"], "*fp32"),
    **dict.fromkeys(["cu_seqlens", "chunk_indices", "queue"], "*i64"),
    **dict.fromkeys(["slot_of_chunk", "flags", "ticket", "slot_offsets", "slot_runs"], "*i32"),
    **dict.fromkeys(["counts", "owner", "owned_token", "token_of_row", "first_row", "shared_slot"], "*i32"),
    **dict.fromkeys(
        ["step", "skip", "total", "dstep", "dskip", "sums", "log_rate", "bias", "decay", "ddecay"], "*fp32"
    ),
    **dict.fromkeys(["num_rows", "num_tokens", "num_shared", "num_pairs"], "i32"),
    **dict.fromkeys(["dbias", "dlog_rate", "dweight"], "*fp32"),
    **dict.fromkeys(["scale", "lower_bound", "epsilon"], "fp32"),
}
"""Of arguments; all others are pointers to bfloat16."""
MAX_SPILLED_BYTES = 150
"""Stores and loads, of a thread."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    pipelined: bool
    """Whether chunks are copied to shared memory ahead of their turn."""
    wide: bool
    """Whether some of it is read and written 16 bytes at a time."""


def test_float32_in_the_interpreter():
    pytest.importorskip("fla")
    for file in INTERPRETED:
        run_interpreted(file, marker="not slow")


@pytest.mark.slow
def test_more_of_it_in_the_interpreter():
    pytest.importorskip("fla")
    run_interpreted(INTERPRETED[0], marker="slow")


def compile_kernel(kernel: Any, constants: dict[str, Any], *, num_warps: int, num_stages: int) -> Compiled:
    """For sm_90, with aligned pointers."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "*bf16") for name in names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "num_stages": num_stages}
    )
    machine_code = assembled(compiled.asm["ptx"])
    found = Compiled(
        registers=machine_code.registers,
        spilled_bytes=machine_code.spilled_bytes,
        shared_bytes=compiled.metadata.shared,
        pipelined=machine_code.has("cp.async"),
        wide=all(machine_code.has(f"{way}.global.v4.b32") for way in ("ld", "st")),
    )
    print(kernel.__name__, constants, found)  # noqa: T201 - shown by `pytest -rP`
    return found


def check(found: Compiled) -> None:
    assert found.spilled_bytes <= MAX_SPILLED_BYTES
    assert found.shared_bytes <= 227 * 1024, "of a multiprocessor of an H200"
    assert found.pipelined


@pytest.mark.parametrize("work", ["few", "many"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("gate", "H", "HV", "K", "V"), [("g", 16, 32, 128, 128), ("gk", 32, 32, 128, 128)])
def test_delta_rule_compiles(gate: str, H: int, HV: int, K: int, V: int, backward: bool, work: str):  # noqa: N803
    pytest.importorskip("triton")
    from harts.layers.linear_attention.kernels import delta_rule

    shape = getattr((delta_rule.BACKWARD if backward else delta_rule.FORWARD)[K], work)
    constants: dict[str, Any] = {"H": H, "HV": HV, "K": K, "V": V, "BT": 64, "BK": K, "BV": shape.block_v}
    constants |= {"USE_G": gate == "g", "USE_GK": gate == "gk", ("gk" if gate == "g" else "g"): None}
    constants["SPREAD"] = 132 if shape.spread else 0
    if not backward:
        constants |= {"SAVE": True, "INTERPRETED": False}
    kernel = delta_rule._backward if backward else delta_rule._forward
    check(compile_kernel(kernel, constants, num_warps=shape.num_warps, num_stages=shape.num_stages))


@pytest.mark.parametrize(
    ("name", "spilled_bytes"), [("chunk_gradients", 400), ("wy_gradients", 1500), ("channel_gradients", 400)]
)
def test_gradients_inside_chunks_compile(name: str, spilled_bytes: int):
    """They spill: smaller tiles and fewer heads a program spill less and took longer on an H200."""
    pytest.importorskip("triton")
    kernels = importlib.import_module(f"harts.layers.linear_attention.kernels.{name}")
    shape = kernels.SHAPE
    constants: dict[str, Any] = {"H": 16, "HV": 32, "K": 128, "V": 128, "BT": 64, "BK": shape.block_k or 128}
    constants |= {"BV": shape.block_v, **({"USE_W": True} if name == "chunk_gradients" else {})}
    found = compile_kernel(kernels._gradients, constants, num_warps=shape.num_warps, num_stages=shape.num_stages)
    assert found.spilled_bytes <= spilled_bytes
    assert found.shared_bytes <= 227 * 1024, "of a multiprocessor of an H200"


def test_gradients_of_pairs_compile():
    pytest.importorskip("triton")
    from harts.layers.linear_attention.kernels import pair_gradients as kernels

    constants = {"H": 32, "HV": 32, "K": 128, "BT": 64, "BC": kernels.BLOCK, "BK": kernels.BLOCK_K, "LEVELS": 4}
    check(
        compile_kernel(
            kernels._gradients, constants, num_warps=kernels.NUM_WARPS, num_stages=kernels.NUM_STAGES
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("multiprocessors", "shared_kib", "programs", "trunk_first"),
    [(132, 228, 128, True), (132, 228, 133, False), (128, 100, 128, False), (128, 100, 64, True)],
    ids=["H200", "H200, too many", "one at a time fills the device", "one at a time, half of it"],
)
def test_the_trunk_goes_first_only_where_others_have_room(
    multiprocessors: int, shared_kib: int, programs: int, trunk_first: bool, monkeypatch: pytest.MonkeyPatch
):
    """Its programs wait inside for the others: if they filled the device, all would wait forever."""
    pytest.importorskip("triton")
    from harts.layers.linear_attention.kernels import decay_states, queue

    device = torch.device("cuda")
    properties = SimpleNamespace(
        multi_processor_count=multiprocessors, shared_memory_per_multiprocessor=shared_kib * 1024
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    launch: Any = SimpleNamespace(trunk_first_queue="trunk", backward_queue="strict", trunk_first_pays=True)
    resident = queue.resident_programs(decay_states.BACKWARD.num_warps, decay_states.SHARED_BYTES, device)
    chosen: Any = queue.backward_queue(launch, programs, device, resident=resident)
    assert chosen == ("trunk" if trunk_first else "strict")


SIMPLE = {
    "lightning": ("gamma", 64, 64, 128, 128),
    "mamba2 of nemotron_h": ("g", 8, 128, 128, 64),
    "mamba2 of bamba": ("g", 1, 128, 256, 64),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", SIMPLE)
def test_decays_compile(name: str, backward: bool):
    pytest.importorskip("triton")
    from harts.layers.linear_attention.kernels import decay_states

    gate, heads, value_heads, key_width, value_width = SIMPLE[name]
    shape = decay_states.BACKWARD if backward else decay_states.FORWARD
    constants: dict[str, Any] = {"H": heads, "HV": value_heads, "K": key_width, "V": value_width, "BT": 64}
    constants |= {"BK": shape.block_k, "BV": shape.block_v, "USE_G": gate == "g", "USE_GAMMA": gate == "gamma"}
    constants["SPREAD"] = 132 if shape.spread else 0
    constants["gamma" if gate == "g" else "g"] = None
    if not backward:
        constants["INTERPRETED"] = False
    kernel = decay_states._backward if backward else decay_states._forward
    found = compile_kernel(kernel, constants, num_warps=shape.num_warps, num_stages=shape.num_stages)
    check(found)
    assert found.registers <= 255 and found.shared_bytes <= decay_states.SHARED_BYTES


ROW_KERNELS = {
    "activated_rows": (("_activate", "_gradient"), {"HEADS": 64, "WIDTH": 128, "ROWS": 8, "CHANNELS": 512}),
    "decay_rows": (("_decays", "_gradients"), {"HEADS": 32, "WIDTH": 128, "ROWS": 32, "CHANNELS": 128}),
    "gated_norm": (("_outputs", "_gradients"), {"HEADS": 32, "WIDTH": 128, "PAIRS": 32, "CHANNELS": 128}),
    "mamba2_rows": (
        ("_times_steps", "_outputs", "_input_gradients"), {"HEADS": 64, "WIDTH": 64, "PAIRS": 64, "CHANNELS": 64}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, (names, _) in ROW_KERNELS.items() for name in names])
def test_kernels_of_rows_read_and_write_16_bytes_at_a_time(file: str, name: str):
    pytest.importorskip("triton")
    kernels = importlib.import_module(f"harts.layers.linear_attention.kernels.{file}")
    how = {"SILU": True, "APPROXIMATE": True, "ROUNDED": file == "gated_norm", "BOUNDED": False}
    sizes = {**ROW_KERNELS[file][1], **how}
    assert all(getattr(kernels, size, sizes[size]) == sizes[size] for size in ("ROWS", "PAIRS") if size in sizes)
    assert file != "gated_norm" or sizes["PAIRS"] * sizes["CHANNELS"] == kernels.TILE
    kernel = getattr(kernels, name)
    constants = {size: value for size, value in sizes.items() if size in kernel.arg_names}
    found = compile_kernel(kernel, constants, num_warps=4, num_stages=1)
    assert found.spilled_bytes == 0
    assert found.wide


@pytest.mark.parametrize("width", [64, 192, 512])
def test_gated_norms_of_other_widths_fit_in_registers(width: int):
    triton = pytest.importorskip("triton")
    kernels = importlib.import_module("harts.layers.linear_attention.kernels.gated_norm")
    channels = triton.next_power_of_2(width)
    sizes = {"HEADS": 32, "WIDTH": width, "PAIRS": kernels.TILE // channels, "CHANNELS": channels}
    how = {"SILU": True, "ROUNDED": True, "APPROXIMATE": True}
    for kernel in (kernels._outputs, kernels._gradients):
        assert compile_kernel(kernel, {**sizes, **how}, num_warps=4, num_stages=1).spilled_bytes == 0
