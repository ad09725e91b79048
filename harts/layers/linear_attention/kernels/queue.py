"""Work that programs take from a queue, and states that they hand over: what recurrences along a tree share.

Programs take (run, head, tile of the state) by counting up a ticket. A run that starts from another's state spins on a
flag until it is there, and backward a run collects the gradients of all runs that start inside it, in the order of
`slot_runs`. Whatever a program waits for is ahead of it in the queue (`harts.layout.launch`), so it is held by a
program that already runs: no order in which the device starts programs can deadlock.
"""

# What Triton compiles is not Python to a type checker.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import smid

from harts.layout.launch import LaunchIndex


@triton.jit
def wait_for_turn(ticket, SPREAD: tl.constexpr, PATIENCE: tl.constexpr = 32):
    """Leave the first tickets to programs that are the first on their multiprocessor, of which there are `SPREAD`.

    The longest runs come first, and two programs of one of them on the same multiprocessor take twice as long. Nothing
    depends on it: patience ends, as where there are fewer multiprocessors.
    """
    before = tl.atomic_add(ticket + 1 + smid() % SPREAD, 1, sem="relaxed")
    taken = 0
    looked = 0
    while (before > 0) & (taken < SPREAD) & (looked < PATIENCE):
        taken = tl.atomic_add(ticket, 0, sem="relaxed")
        looked += 1


@triton.jit
def take_work(ticket, queue, HEADS: tl.constexpr, TILES: tl.constexpr, SPREAD: tl.constexpr):
    """Run, head, tile, first row, rows, first chunk and start slot (or -1) of the next piece of work.

    Args:
        ticket, queue: Of `ticket_and_flags` and a `LaunchIndex`.
        HEADS, TILES: Of each run.
        SPREAD: Multiprocessors over which to spread the first pieces; 0 to leave it.
    """
    if SPREAD > 0:  # noqa: SIM102 - decided while compiling
        # Programs start in the order of their numbers: later ones find the first pieces taken.
        if tl.program_id(0) < 8 * SPREAD:
            wait_for_turn(ticket, SPREAD)
    number = tl.atomic_add(ticket, 1, sem="relaxed")
    tile = number % TILES
    head = (number // TILES) % HEADS
    # One row of the queue has all there is to know of a run: short runs take little longer than looking it up.
    record = queue + (number // (TILES * HEADS)) * 5
    run, begin, rows = tl.load(record), tl.load(record + 1), tl.load(record + 2).to(tl.int32)
    return run, head, tile, begin, rows, tl.load(record + 3), tl.load(record + 4)


@triton.jit
def wait_for_all_threads(INTERPRETED: tl.constexpr):
    """All threads have stored before one of them says so. Triton does not pipeline loops with its own barrier."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [tl.arange(0, 128)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def add_start_state(total, states, mask, flag):
    """Wait for the state that a run starts from, and add it."""
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass
    # Past the first-level cache, which does not see what other multiprocessors write.
    return total + tl.load(states, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def hand_over(state, slot, states, flags, mask, STATE: tl.constexpr, FLAGS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Leave a state for the runs that start from it, if there is a slot for it.

    Args:
        state, mask: A tile.
        slot: Or -1.
        states, flags: Where the tile and its flag are in the first slot.
        STATE, FLAGS: How many elements and flags a slot has.
        INTERPRETED: Whether there is one thread only.
    """
    if slot >= 0:
        number = slot.to(tl.int64)
        tl.store(states + number * STATE, state, mask=mask)
        wait_for_all_threads(INTERPRETED)
        tl.atomic_xchg(flags + number * FLAGS, 1, sem="release")


@triton.jit
def hand_back(gradient, gradients, mask, count):
    """Leave the gradient of a start state for the run that it came from."""
    tl.store(gradients, gradient, mask=mask)
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release")


@triton.jit
def add_gradients(total, gradients, mask, stride, slot, slot_offsets, slot_runs, count):
    """Wait for all runs that start from a slot, and add what they left, `stride` elements a run, in their order."""
    first = tl.load(slot_offsets + slot)
    end = tl.load(slot_offsets + slot + 1)
    while tl.atomic_add(count, 0, sem="acquire") < end - first:
        pass
    for j in range(first, end):
        run = tl.load(slot_runs + j).to(tl.int64)
        # Past the first-level cache, which does not see what other multiprocessors write.
        total += tl.load(gradients + run * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchShape:
    """How work is cut and run; results do not depend on it."""

    block_k: int | None = None
    """Keys of a program's tile; None for all of them, which the delta rule needs."""
    block_v: int
    """Values of a program's tile."""
    num_warps: int
    num_stages: int
    """Chunks in flight."""
    spread: bool = False
    """Whether the first pieces of work are spread over multiprocessors, where more than one program fits on one."""


REGISTERS = 65_536
"""Of a multiprocessor, on all NVIDIA GPUs that Triton compiles for."""
RESERVED_BYTES = 1024
"""Shared memory that CUDA keeps of each program."""
ALIGNED = 4
"""Elements: flags begin at an aligned address."""


def ticket_and_flags(num_flags: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two int32 views of one tensor of zeros: one launch clears both.

    The first one begins with the ticket, and with what every multiprocessor counts.
    """
    before = -(-(1 + multiprocessors(device)) // ALIGNED) * ALIGNED
    zeros = torch.zeros(before + num_flags, dtype=torch.int32, device=device)
    return zeros, zeros[before:]


def spread(shape: LaunchShape, device: torch.device) -> int:
    """Multiprocessors over which programs spread the first pieces of work; 0 where they do not, or are interpreted."""
    return multiprocessors(device) if shape.spread and not triton.knobs.runtime.interpret else 0


def backward_queue(launch: LaunchIndex, programs: int, device: torch.device, *, resident: int = 1) -> Tensor:
    """The order in which runs are taken up backward: the longest first where it pays and cannot block.

    Args:
        launch: The runs.
        programs: Of each run. Those of the longest may wait inside if they leave half of the device to what they wait
            for.
        device: Where they run.
        resident: Programs that a multiprocessor holds at least.
    """
    leaves_room = not triton.knobs.runtime.interpret and 2 * programs <= resident * multiprocessors(device)
    return launch.trunk_first_queue if leaves_room and launch.trunk_first_pays else launch.backward_queue


def resident_programs(num_warps: int, shared_bytes: int, device: torch.device) -> int:
    """Programs that a multiprocessor holds at least: of so many warps, with 255 registers a thread.

    Args:
        num_warps: Of a program.
        shared_bytes: Shared memory that a program takes at most.
        device: Where they run.
    """
    if device.type != "cuda":
        return 1
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return max(1, min(REGISTERS // (256 * 32 * num_warps), shared // (shared_bytes + RESERVED_BYTES)))


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 of a CPU, on which Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def padded(width: int) -> int:
    """The smallest power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(width))
