"""A stage imports only earlier stages, so the flow can be read in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

ORDER = (
    "data",
    "tree",
    "plan",
    "layout",
    "layers",
    "models",
    "logprobs",
    "objective",
    "microbatches",
    "routers",
    "step",
    "check",
    "inspect",
    "rollout",
    "train",
    "integrations",
    "cli",
)
# The package itself (`import harts`) re-exports the check and trees to look at, the test oracle runs a step.
AS_STAGE = {"": "inspect", "testing": "step"}
# `config` imports no stage, so it may stand before all of them, but only these read it.
CONFIG_READERS = ("rollout", "train", "cli")
# The demo's own rollouts: inside `train`, the loop alone knows them.
ROLLOUT_READERS = ("rollout", "cli")
TRAIN_LOOP = "harts.train.loop"
# Objectives see trajectories, never a tree.
OBJECTIVE_READS = ("data", "objective")


def stage_of(module: str) -> str:
    """The stage of a dotted module name; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def rank_of(stage: str) -> int:
    return ORDER.index(AS_STAGE.get(stage, stage))


def imported_modules(module: str, source: str, *, is_package: bool, stages: frozenset[str]) -> list[str]:
    """Dotted names of the `harts` modules that a file imports, relative and deferred imports included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            # `from harts import plan` names a stage, `from harts import Trajectory` the package.
            names += [f"harts.{a.name}" if base == "harts" and a.name in stages else base for a in node.names]
    return [name for name in names if name.split(".")[0] == "harts"]


def violation(module: str, imported: str) -> str | None:
    """Why `module` must not import `imported`, or None if it may."""
    stage, other = stage_of(module), stage_of(imported)
    if stage == other:
        return None
    if stage == "config":
        return f"{module} imports {imported}, but config imports no stage"
    if other == "config":
        return None if stage in CONFIG_READERS else f"{module} imports {imported}, but only {CONFIG_READERS} may"
    if other == "rollout" and not (stage in ROLLOUT_READERS or module == TRAIN_LOOP):
        return f"{module} imports {imported}, but of the stages after it only {TRAIN_LOOP} and cli may"
    if stage == "objective" and other not in OBJECTIVE_READS:
        return f"{module} imports {imported}, but objectives know nothing but {OBJECTIVE_READS}"
    if rank_of(other) > rank_of(stage):
        return f"{module} imports {imported}, a later stage"
    return None


def violations(root: Path) -> list[str]:
    """All violations in the files of the `harts` folder in `root`."""
    package = root / "harts"
    stages = frozenset(path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py")
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        if stage_of(module) not in (*ORDER, *AS_STAGE, "config"):
            found.append(f"{module} belongs to no stage; give it a place in ORDER")
            continue
        for name in imported_modules(module, path.read_text(encoding="utf-8"), is_package=is_package, stages=stages):
            if reason := violation(module, name):
                found.append(reason)
    return found


def test_every_stage_imports_only_earlier_stages():
    assert violations(ROOT) == []


PLANTED = {
    "absolute": ("tree/lcp.py", "import harts.plan.cost"),
    "from a stage": ("tree/lcp.py", "from harts.layout.rounds import plan_runs"),
    "from the package": ("layers/x.py", "from harts import models"),
    "a public name of the package": ("data/x.py", "from harts import train_step"),
    "relative": ("data/readers/x.py", "from ...tree import prefix_tree"),
    "relative in an __init__": ("plan/__init__.py", "from ..step import train_step"),
    "inside a function": ("models/x.py", "def f():\n    from harts.logprobs import restore"),
    "objective reads a tree": ("objective/x.py", "from harts.tree.prefix_tree import PrefixTree"),
    "config reads a stage": ("config.py", "from harts.data import Trajectory"),
    "stage reads config": ("plan/x.py", "from harts.config import Config"),
    "train reads rollout outside the loop": ("train/checkpoint.py", "from harts.rollout import collect"),
    "integration reads rollout": ("integrations/x.py", "from harts.rollout import collect"),
    "testing reads train": ("testing.py", "import harts.train"),
    "no such stage": ("utils/x.py", ""),
}
ALLOWED = {
    "earlier stage": ("plan/x.py", "from harts.tree import prefix_tree"),
    "own stage": ("plan/x.py", "from . import cost"),
    "other packages": ("data/x.py", "import numpy as np\nfrom torch import Tensor"),
    "the loop reads rollout and config": ("train/loop.py", "import harts.rollout.collect\nimport harts.config"),
    "testing reads step": ("testing.py", "from harts.step import train_step"),
    "cli reads the package": ("cli/x.py", "from harts import __version__"),
}


def plant(root: Path, name: str, source: str) -> None:
    for stage in (*ORDER, "config"):
        if stage not in ("step", "config"):
            (root / "harts" / stage).mkdir(parents=True, exist_ok=True)
    (root / "harts" / "step.py").write_text("from harts.objective import streams\n", encoding="utf-8")
    path = root / "harts" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, case: str):
    plant(tmp_path, *PLANTED[case])
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize("case", ALLOWED)
def test_an_allowed_import_is_not_reported(tmp_path: Path, case: str):
    plant(tmp_path, *ALLOWED[case])
    assert violations(tmp_path) == []
