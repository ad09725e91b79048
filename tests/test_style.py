"""The limits of CONTRIBUTING.md that a program can check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("harts", "tests", "benchmarks", "docs", "examples")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 100
MAX_PARAMETERS = 7
DISTRIBUTED_FILE = Path("harts/train/distributed.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(folders: tuple[str, ...] = FOLDERS) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_kernel(function: Function) -> bool:
    """Whether a function is compiled by Triton or CuTe, whose kernels cannot be cut up as freely."""
    return any(ast.unparse(decorator).split("(")[0].endswith(".jit") for decorator in function.decorator_list)


def long_functions(tree: ast.AST) -> list[str]:
    found = []
    for function in functions(tree):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if lines > (MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES):
            found.append(f"{function.name} (line {function.lineno}): {lines} lines")
    return found


def long_parameter_lists(tree: ast.AST) -> list[str]:
    found = []
    for function in functions(tree):
        arguments = function.args
        count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
        count += (arguments.vararg is not None) + (arguments.kwarg is not None)
        if count > MAX_PARAMETERS and not is_kernel(function):
            found.append(f"{function.name} (line {function.lineno}): {count} parameters")
    return found


def broad_excepts(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in caught):
                found.append(f"broad except (line {node.lineno})")
    return found


def attribute_probes(tree: ast.AST) -> list[str]:
    return [
        f"hasattr (line {node.lineno})"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "hasattr"
    ]


def mentions_distributed(tree: ast.AST) -> bool:
    """Whether code (not a docstring) names `torch.distributed` or something inside it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        if any(f"{name}.".startswith("torch.distributed.") for name in names):
            return True
    return False


CHECKS = (long_functions, long_parameter_lists, broad_excepts, attribute_probes)


def test_files_keep_the_limits():
    found = []
    for path in python_files():
        source = path.read_text(encoding="utf-8")
        lines = len(source.splitlines())
        problems = [f"{lines} lines"] if lines > MAX_FILE_LINES else []
        for check in CHECKS:
            problems += check(ast.parse(source))
        found += [f"{path.relative_to(ROOT)}: {problem}" for problem in problems]
    assert found == []


def test_only_one_file_knows_torch_distributed():
    users = {
        path.relative_to(ROOT)
        for path in python_files(("harts",))
        if mentions_distributed(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert users <= {DISTRIBUTED_FILE}


PLANTED = {
    "long function": (long_functions, "def f():\n" + "    x = 1\n" * 60),
    "long method": (long_functions, "class A:\n    async def f(self):\n" + "        x = 1\n" * 60),
    "long kernel": (long_functions, "@triton.jit\ndef f():\n" + "    x = 1\n" * 100),
    "eight parameters": (long_parameter_lists, "def f(self, a, b, c, d, *, e, f, g): ..."),
    "eight with star arguments": (long_parameter_lists, "def f(a, b, c, d, e, f, *g, **h): ..."),
    "bare except": (broad_excepts, "try:\n    f()\nexcept:\n    pass"),
    "except Exception": (broad_excepts, "try:\n    f()\nexcept Exception as error:\n    raise"),
    "except with Exception in a tuple": (broad_excepts, "try:\n    f()\nexcept (KeyError, Exception):\n    pass"),
    "hasattr": (attribute_probes, "x = hasattr(a, 'b')"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case: str):
    check, source = PLANTED[case]
    assert len(check(ast.parse(source))) == 1


KEPT = {
    "sixty lines": "def f():\n" + "    x = 1\n" * 59,
    "a kernel of a hundred lines": "@triton.jit\ndef f():\n" + "    x = 1\n" * 99,
    "seven parameters": "def f(self, a, b, c, *, d, e, f): ...",
    "narrow except": "try:\n    f()\nexcept (KeyError, OSError):\n    pass",
}


@pytest.mark.parametrize("case", KEPT)
def test_code_within_the_limits_is_not_reported(case: str):
    assert [problem for check in CHECKS for problem in check(ast.parse(KEPT[case]))] == []


DISTRIBUTED = {
    "import torch.distributed as dist": True,
    "import torch.distributed.checkpoint": True,
    "from torch import distributed": True,
    "from torch.distributed.fsdp import fully_shard": True,
    "torch.distributed.barrier()": True,
    "import torch": False,
    "'Does without torch.distributed.'": False,
    "from torch.distributions import Categorical": False,
}


@pytest.mark.parametrize("source", DISTRIBUTED)
def test_uses_of_torch_distributed_are_recognised(source: str):
    assert mentions_distributed(ast.parse(source)) is DISTRIBUTED[source]
