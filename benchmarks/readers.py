"""`harts inspect` on files of 10^9 tokens: seconds and peak memory, as a user would run it, in a process of its own.

    python -m benchmarks.readers --json                    10^9 token ids, and shapes of as many, and reports/readers.md
    python -m benchmarks.readers --tokens 1e7 --no-report  a few seconds

Files are generated first (8 GB in a temporary folder, removed afterwards): groups of 16 trajectories of 8k and of 32k
tokens that part three times, ids up to 150,000, the smaller ones more often, and masks. Every run is checked before a
figure of it is used: trajectories, tokens, distinct and trained tokens are known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.evidence import markdown_table, provenance, report_file

Row = dict[str, object]
PARTS = (1, 2, 4, 16)
"""Segments of a group from the prompt to the leaves; trajectories go through one of each."""
LENGTHS = (8_000, 32_000)
VOCABULARY = 150_000
SECONDS, MEMORY = 60.0, 3.0
"""Bars for 10^9 tokens: seconds, and peak memory as a multiple of the ids as 32-bit numbers."""
TURN = 100
"""Tokens of a turn; every other one is trained."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a file holds."""

    trajectories: int
    """In all groups."""
    tokens_flat: int
    """Of all trajectories."""
    tokens_distinct: int
    """Of all trees."""
    trained_flat: int
    """Trained tokens of all trajectories."""


def main() -> None:
    """Generate, run, check, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--tokens", type=float, default=1e9, help="of each file, about")
    parser.add_argument("--folder", type=Path, help="for the generated files, instead of the system's temporary one")
    parser.add_argument("--no-report", action="store_true", help="leave reports/readers.md as it is")
    options = parser.parse_args()
    rows = list(measure(int(options.tokens), options.folder))
    if not options.no_report:
        write_report(rows)
    if options.json:
        print(json.dumps({**provenance(), "cores": os.cpu_count(), "runs": rows}))
    else:
        print(markdown_table(rows))


def measure(tokens: int, folder: Path | None) -> Iterator[Row]:
    """A row a file."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        warm = Path(temporary) / "warm.jsonl"
        write_ids(warm, 1)
        # Compiled loops are cached on the disk by the first process that needs them.
        inspect(warm)
        for name, write in (("token ids", write_ids), ("shapes", write_shapes)):
            path = Path(temporary) / "rollouts.jsonl"
            expected = write(path, tokens)
            load = round(os.getloadavg()[0], 1)
            numbers, used = inspect(path)
            for key in expected.__dataclass_fields__:
                if numbers[key] != getattr(expected, key):
                    raise RuntimeError(f"{name}: {key} is {numbers[key]}, expected {getattr(expected, key)}.")
            yield {
                "file": name,
                "tokens": expected.tokens_flat,
                "ratio": expected.tokens_flat / expected.tokens_distinct,
                "GB": path.stat().st_size / 1e9,
                "seconds": used["seconds"],
                "CPU seconds": used["CPU seconds"],
                "tokens a second": expected.tokens_flat / used["seconds"],
                "peak memory, MB": used["memory"] / 1e6,
                "peak memory / ids of 4 bytes": used["memory"] / (4 * expected.tokens_flat),
                "load before": load,
            }
            path.unlink()


def inspect(path: Path) -> tuple[dict[str, int], dict[str, float]]:
    """What `harts inspect PATH --json` says; seconds by the clock and of processors, and peak memory in bytes."""
    command = [sys.executable, "-c", "from harts.cli.main import app; app()", "inspect", str(path), "--json"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        raise RuntimeError(f"harts inspect ended with {process.returncode}.")
    used = {"seconds": seconds, "CPU seconds": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss * 1024.0}
    return json.loads(printed), used


def groups(tokens: int) -> Iterator[list[list[int]]]:
    """Lengths of the segments of every group, level by level, until there are enough tokens."""
    random, done = np.random.default_rng(0), 0
    while done < tokens:
        mean = LENGTHS[int(random.integers(2))] // len(PARTS)
        sizes = [random.integers(mean // 2, 3 * mean // 2, parts).tolist() for parts in PARTS]
        done += sum(
            sum(sizes[level][leaf * parts // PARTS[-1]] for level, parts in enumerate(PARTS)) for leaf in leaves()
        )
        yield sizes


def leaves() -> range:
    """Trajectories of a group."""
    return range(PARTS[-1])


def path_of(leaf: int) -> list[int]:
    """The number of its segment on every level."""
    return [leaf * parts // PARTS[-1] for parts in PARTS]


def write_ids(path: Path, tokens: int) -> Expected:
    """Our own format: ids and mask."""
    random = np.random.default_rng(1)
    words = np.array([str(i) for i in range(VOCABULARY)], dtype=object)
    counts = np.zeros(4, dtype=np.int64)
    with path.open("w") as file:
        for number, sizes in enumerate(groups(tokens)):
            ids = [[_ids(random, words, size, sibling) for sibling, size in enumerate(level)] for level in sizes]
            masks = [[_mask(size) for size in level] for level in sizes]
            for leaf in leaves():
                places = path_of(leaf)
                mask = np.concatenate([masks[level][place] for level, place in enumerate(places)])
                # Nothing predicts the first token.
                mask[0] = 0
                flat = ",".join(ids[level][place] for level, place in enumerate(places))
                marked = (mask + ord("0")).astype(np.uint8).tobytes().decode("ascii")
                counts += [1, mask.size, 0, int(mask.sum())]
                file.write(
                    f'{{"token_ids":[{flat}],"loss_mask":[{",".join(marked)}],"advantages":0.5,"group_id":{number}}}\n'
                )
            counts[2] += sum(map(sum, sizes))
    return _expected(counts)


def _ids(random: np.random.Generator, words: np.ndarray, size: int, sibling: int) -> str:
    ids = (VOCABULARY * random.random(size) ** 2).astype(np.int64)
    # Siblings part at once, so that distinct tokens are known.
    ids[0] = sibling
    return ",".join(words[ids])


def _mask(size: int) -> np.ndarray:
    return (np.arange(size) // TURN % 2).astype(np.int64)


def write_shapes(path: Path, tokens: int) -> Expected:
    """Lengths, common prefixes and trained spans of the same trees."""
    counts = np.zeros(4, dtype=np.int64)
    with path.open("w") as file:
        for sizes in groups(tokens):
            lengths, lcps, spans = [], [], []
            for leaf in leaves():
                places, before = path_of(leaf), path_of(leaf - 1)
                own = [sizes[level][place] for level, place in enumerate(places)]
                shared = sum(size for size, *same in zip(own, places, before, strict=True) if same[0] == same[1])
                lengths.append(sum(own))
                lcps.append(shared if leaf else 0)
                spans.append([[begin, min(begin + TURN, sum(own))] for begin in range(TURN, sum(own), 2 * TURN)])
            trained = sum(end - begin for each in spans for begin, end in each)
            counts += [len(lengths), sum(lengths), sum(map(sum, sizes)), trained]
            file.write(json.dumps({"length": lengths, "lcp": lcps, "loss_spans": spans}) + "\n")
    return _expected(counts)


def _expected(counts: np.ndarray) -> Expected:
    trajectories, flat, distinct, trained = counts.tolist()
    return Expected(trajectories=trajectories, tokens_flat=flat, tokens_distinct=distinct, trained_flat=trained)


def write_report(rows: list[Row]) -> None:
    """Write reports/readers.md."""
    facts = "\n".join(f"- {name}: {value}" for name, value in provenance().items())
    bars = [
        {
            "bar": f"{name} of {row['tokens']:.0e} tokens of {row['file']}",
            "reached": row[key],
            "limit": limit,
            "holds": row[key] < limit,  # type: ignore[operator]
        }
        for row in rows
        for name, key, limit in (
            ("seconds", "seconds", SECONDS),
            ("CPU seconds", "CPU seconds", SECONDS),
            ("peak memory / ids", "peak memory / ids of 4 bytes", MEMORY),
        )
    ]
    text = (
        f"# Readers\n\n{facts}\n- cores: {os.cpu_count()}\n\n## Bars\n\n"
        f"{markdown_table(bars)}\n\n## Runs\n\n"
        "`harts inspect FILE --json` in a process of its own, start included; the file was just written. The load\n"
        "before a run is that of other jobs and of writing the file: above the cores, seconds are more than alone.\n\n"
        f"{markdown_table(rows)}\n"
    )
    report_file("readers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
