"""What can be asked of Triton kernels on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
INDEX_WORDS = ("ancestor", "row_ptr", "flag", "slot", "offset", "token_ptr", "distance", "index")
DIVISIBLE = ("stride_x", "width", "channels", "stride_into", "stride_logits", "stride_gradient")
INT64_WORDS = ("target",)
FLOAT32_WORDS = ("sum", "needed", "partial", "scale", "logprob", "entropy", "normaliser", "upstream")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A kernel for an H200."""

    ptx: str
    """Its assembly."""
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Stored to and loaded from local memory."""

    def has(self, instruction: str) -> bool:
        """Whether the assembly has a line that names an instruction."""
        return instruction in self.ptx


def run_interpreted(path: str, *, marker: str) -> None:
    """Run the tests of a file that have a marker in a process whose kernels Triton interprets; skip without Triton."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(ROOT / path)]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def compiled_for_h200(kernel: Any, constants: dict[str, Any], *, num_warps: int, element: str = "bf16") -> Compiled:
    """Compile a kernel for sm_90, with aligned pointers and strides.

    Args:
        kernel: Of `triton.jit`.
        constants: Its compile-time arguments. The others are pointers, told by their names, or 32-bit integers.
        num_warps: Of a program.
        element: Type behind pointers to neither indices nor float32 sums.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        else:
            signature[name] = _type_of(name, element)
            if signature[name].startswith("*") or name in DIVISIBLE:
                aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    return assembled(compiled.asm["ptx"])


def _type_of(name: str, element: str) -> str:
    if not name.endswith("_ptr"):
        return "i32"
    if any(word in name for word in FLOAT32_WORDS):
        return "*fp32"
    if any(word in name for word in INT64_WORDS):
        return "*i64"
    return "*i32" if any(word in name for word in INDEX_WORDS) else f"*{element}"


def assembled(ptx: str) -> Compiled:
    """What ptxas makes of a kernel's assembly."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    command = [str(assembler), "-v", "-arch=sm_90a", "-o", os.devnull, "/dev/stdin"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    return Compiled(ptx=ptx, registers=int(registers), spilled_bytes=spilled)
