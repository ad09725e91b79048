"""Which attention kernel is chosen, and what the errors say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from harts.layers.tree_attention import choice
from harts.layers.tree_attention.choice import FLASH_ATTENTION_VERSION, AttentionNeeds, Machine, choose_kernel

NEEDS = AttentionNeeds(dtype=torch.bfloat16, head_width=128, value_width=128, grouped=True)
INSTALLED = {"flash-attn-4": FLASH_ATTENTION_VERSION, "triton": "3.6.0"}
HOPPER = Machine(device_type="cuda", capability=(9, 0), versions=INSTALLED)
AMPERE = replace(HOPPER, capability=(8, 0))
CPU = Machine(device_type="cpu", capability=None, versions={})

CHOICES = {
    "hopper": (NEEDS, HOPPER, "flash4", "fastest"),
    "mla": (replace(NEEDS, head_width=192, grouped=False), HOPPER, "flash4", "fastest"),
    "grouped mla": (replace(NEEDS, head_width=192), HOPPER, "flex", "Repeat the keys"),
    "other version": (NEEDS, replace(HOPPER, versions=INSTALLED | {"flash-attn-4": "4.1"}), "flex", "4.1 is installed"),
    "not installed": (NEEDS, replace(HOPPER, versions={"triton": "3.6.0"}), "flex", "none is installed"),
    "float32": (replace(NEEDS, dtype=torch.float32), HOPPER, "flex", "torch.float32"),
    "float64": (replace(NEEDS, dtype=torch.float64), HOPPER, "sdpa", "Convert the model"),
    "wide": (replace(NEEDS, head_width=512, value_width=512), HOPPER, "flex", "512"),
    "odd width": (replace(NEEDS, head_width=100, value_width=100), HOPPER, "flex", "100"),
    "narrow": (replace(NEEDS, head_width=4, value_width=4), HOPPER, "sdpa", "width 16 or more"),
    "deterministic": (replace(NEEDS, deterministic=True), HOPPER, "flex", "fixed order"),
    "ampere": (NEEDS, AMPERE, "flex", "compute capability 8.0"),
    "blackwell": (NEEDS, replace(HOPPER, capability=(10, 0)), "flex", "tuned for Hopper"),
    "turing": (NEEDS, replace(HOPPER, capability=(7, 5)), "sdpa", "newer GPU"),
    "cpu": (NEEDS, CPU, "sdpa", 'device "cpu"'),
    "deterministic cpu": (replace(NEEDS, deterministic=True), CPU, "sdpa", "cpu"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choice(name: str):
    needs, machine, kernel, reason = CHOICES[name]
    made = choose_kernel(needs, machine)
    assert made.kernel == kernel
    assert reason in made.reason


@pytest.mark.parametrize(
    ("asked", "machine", "message"),
    [
        ("flash4", AMPERE, "Use a Hopper GPU"),
        ("flash4", replace(HOPPER, versions={}), f"pip install flash-attn-4=={FLASH_ATTENTION_VERSION}"),
        ("flex", CPU, "Use a GPU"),
        ("flex", replace(HOPPER, versions={}), "pip install triton"),
        ("flash2", HOPPER, "expected one of flash4, flex, sdpa"),
    ],
)
def test_what_cannot_run_is_refused(asked: str, machine: Machine, message: str):
    with pytest.raises(ValueError, match=message):
        choose_kernel(NEEDS, machine, asked=asked)


@pytest.mark.parametrize("asked", choice.ATTENTION_KERNELS)
def test_what_can_run_is_taken_as_asked(asked: str):
    assert choose_kernel(NEEDS, HOPPER, asked=asked).kernel == asked


def test_this_machine():
    machine = Machine.of(torch.device("cpu"))
    assert (machine.device_type, machine.capability) == ("cpu", None)
