"""Starting is quick: names of the package come when they are used, and looking at rollouts imports no torch."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import harts
from harts.cli.model_names import find_costs
from harts.data.readers import write_trajectories
from harts.data.trajectory import example_trajectories
from harts.plan.calibration import Calibration, Fit

PACKAGE = Path(harts.__file__)
HEAVY = ("torch", "transformers")
"""Seconds to import."""


def imports_for_type_checkers() -> dict[str, str]:
    """Public names and modules of the block that only type checkers read."""
    (block,) = (node for node in ast.parse(PACKAGE.read_text(encoding="utf-8")).body if is_for_type_checkers(node))
    assert isinstance(block, ast.If)
    return {
        alias.asname or alias.name: str(node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parents[1])
    assert result.returncode == 0, result.stderr
    return result.stdout


def heavy_after(*commands: list[str]) -> tuple[str, list[str]]:
    """What some commands print, and which heavy packages they imported."""
    code = (
        "import sys\n"
        "from harts.cli.main import app\n"
        f"codes = [app(command, standalone_mode=False) for command in {commands!r}]\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
        "sys.exit(any(codes))"
    )
    *printed, imported = run(code).splitlines()
    return "\n".join(printed), ast.literal_eval(imported)


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    write_trajectories(tmp_path / "rollouts.jsonl", example_trajectories())
    return tmp_path / "rollouts.jsonl"


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.jsonl"
    path.write_text('{"length": [3, 5, 4, 4], "lcp": [0, 3, 3, 2], "loss_spans": [[[1, 3]], [[3, 5]], [], []]}\n')
    return path


def test_the_lists_of_public_names_agree():
    assert imports_for_type_checkers() == harts._MODULE_OF
    assert sorted(harts._MODULE_OF) == harts.__all__


@pytest.mark.parametrize("name", harts.__all__)
def test_every_public_name_is_there(name: str):
    module = __import__(harts._MODULE_OF[name], fromlist=[name])
    assert getattr(harts, name) is getattr(module, name)
    assert name in dir(harts)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'harts' has no attribute 'tree_step'$"):
        harts.tree_step  # noqa: B018  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'tree_step' from 'harts'"):
        from harts import tree_step  # noqa: F401  # type: ignore[attr-defined]


def test_importing_a_stage_or_all_names_still_works():
    assert run("from harts import layout; print(layout.__name__)") == "harts.layout\n"
    names: dict[str, object] = {}
    exec("from harts import *", names)
    assert {name: names.get(name) for name in harts.__all__} == {name: getattr(harts, name) for name in harts.__all__}


@pytest.mark.parametrize("value", [harts.Trajectory, harts.train_step, harts.Kernels(), harts.grpo()])
def test_public_objects_can_be_pickled(value: object):
    restored = pickle.loads(pickle.dumps(value))
    assert restored is value or restored == value


def test_a_fresh_process_unpickles_without_importing_harts_first(tmp_path: Path):
    path = tmp_path / "kernels.pickle"
    path.write_bytes(pickle.dumps(harts.Kernels()))
    assert run(f"import pickle; print(pickle.load(open({str(path)!r}, 'rb')))") == f"{harts.Kernels()}\n"


def test_the_package_and_its_readers_import_nothing_heavy(rollouts: Path):
    code = (
        f"import sys, harts\n(group,) = harts.read({str(rollouts)!r})\nharts.describe(group)\n"
        f"print(len(group.trajectories), [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(code) == "4 []\n"


def test_help_imports_nothing_heavy():
    names = ["inspect", "plan", "check", "calibrate", "models", "train"]
    printed, imported = heavy_after(["--help"], *([name, "--help"] for name in names))
    assert (printed.count("Usage: "), imported) == (1 + len(names), [])


@pytest.mark.parametrize("source", ["rollouts", "shapes"])
def test_inspect_imports_nothing_heavy(source: str, request: pytest.FixtureRequest, tmp_path: Path):
    page = tmp_path / "page.html"
    arguments = ["inspect", str(request.getfixturevalue(source)), "--json", "--html", str(page)]
    printed, imported = heavy_after(arguments)
    report = json.loads(printed)
    assert (report["tokens_flat"], report["tokens_distinct"], imported) == (16, 8, [])
    assert page.exists()


def test_plan_with_a_calibration_imports_nothing_heavy(shapes: Path, tmp_path: Path):
    named = find_costs("tiny:qwen3")
    calibration = Calibration(
        model="tiny:qwen3",
        device="cpu",
        dtype="float32",
        dimensions=named.dimensions,
        tree=Fit(parameters=named.costs.tree, held_out=()),
        flat=Fit(parameters=named.costs.flat, held_out=()),
        saved_bytes_per_token=8.0,
    )
    stored = tmp_path / "calibration.json"
    stored.write_text(calibration.to_json())
    arguments = ["plan", str(shapes), "--model", str(stored), "--ranks", "1", "--max-tokens", "8", "--json"]
    printed, imported = heavy_after(arguments)
    assert (json.loads(printed)["tokens_flat"], imported) == (16, [])


def test_a_model_is_what_needs_transformers(shapes: Path):
    _, imported = heavy_after(["inspect", str(shapes), "--json", "--model", "default:qwen3"])
    assert "transformers" in imported
