"""What every report of a GPU states."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = ("torch", "triton", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "fla-core")


def gpu_provenance() -> dict[str, str]:
    """GPU, commit, versions of what the kernels come from."""
    found = {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "commit": _commit()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The commit, or why there is none: a copy of the tree may lack its history."""
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "not in a repository"
