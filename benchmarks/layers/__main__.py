"""`python -m benchmarks.layers NAME [options]`; `--help` after a name lists its options."""

from __future__ import annotations

import importlib
import sys

MODULES = {
    "attention": "benchmarks.layers.attention",
    "conv": "benchmarks.layers.conv",
    "linear": "benchmarks.layers.linear_attention",
    "lm_head": "benchmarks.layers.lm_head",
    "rows": "benchmarks.layers.rows",
}
"""Benchmarks by name; each module has `main(arguments)`. Imported when asked for, since each needs other packages."""


def main() -> None:
    """Run the benchmark that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in MODULES:
        raise SystemExit(f"python -m benchmarks.layers NAME [options], NAME one of: {', '.join(MODULES)}")
    try:
        module = importlib.import_module(MODULES[name])
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. Layers are timed on a GPU: pip install -e '.[gpu]' there.") from error
    module.main(sys.argv[2:])


if __name__ == "__main__":
    main()
