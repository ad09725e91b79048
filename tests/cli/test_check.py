"""`harts check`: its one line of JSON, its tables, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

from harts.cli.main import app
from harts.models import attention
from harts.models.registry import supported_types

runner = CliRunner()


# Layers of all are held by tests/test_equivalence.py, reports by tests/check; together these are slow.
DEFAULT = ("lfm2",)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=[] if t in DEFAULT else [pytest.mark.slow]) for t in supported_types()],
)
def test_every_tiny_model_is_exact_in_float64(model_type: str):
    result = runner.invoke(
        app, ["check", "--model", f"tiny:{model_type}", "--data", "synthetic", "--dtype", "float64", "--json"]
    )
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    assert (fields["verdict"], fields["leak"]) == ("exact", False)
    assert fields["max_logprob_diff"] < 1e-10
    assert fields["max_grad_rel_diff"] < 1e-10
    assert fields["logit_cosine"] == pytest.approx(1.0, abs=1e-12)
    assert (fields["rounds"] > 0) == (fields["replayed_tokens"] > 0)


def test_tables_and_a_file_of_trajectories(tmp_path: Path):
    data = tmp_path / "rollouts.jsonl"
    lines = [{"token_ids": ids, "group_id": 0} for ids in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], list(range(50)))]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = runner.invoke(app, ["check", "--model", "tiny:qwen3_5", "--data", str(data), "--max-tokens", "20"])
    assert result.exit_code == 0, result.output
    assert "12 tokens, 7 distinct" in result.stdout
    for text in ("flat, padded", "Qwen3_5GatedDeltaNet", "token-wise", "verdict: within-noise"):
        assert text in result.stdout


def test_bits_in_exact_mode():
    arguments = ["check", "--model", "tiny:qwen3_5", "--exact"]
    fields = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert (fields["verdict"], fields["tokens_different"], fields["max_logprob_diff"]) == ("bit-equal", 0, 0.0)
    shown = runner.invoke(app, arguments)
    assert shown.exit_code == 0
    assert "1,735 tokens, 569 distinct" in shown.stdout and "verdict: bit-equal" in shown.stdout


def test_exit_code_1_if_trees_differ(monkeypatch: pytest.MonkeyPatch):
    exact = attention.tree_attention

    def off(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return exact(1.01 * q, k, v, **options)

    monkeypatch.setattr(attention, "tree_attention", off)
    result = runner.invoke(app, ["check", "--model", "tiny:qwen3", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "differs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny:gpt9"], "Model type 'gpt9' does not run on trees"),
        (["--model", "tiny:qwen3", "--data", "nothing.jsonl"], "nothing.jsonl"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments: list[str], message: str):
    result = runner.invoke(app, ["check", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
