"""`harts models` as a user calls it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from harts.cli.main import app
from harts.models.registry import model_table, supported_types


def test_json_is_the_table():
    result = CliRunner().invoke(app, ["models", "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["model_type"]: row for row in json.loads(result.stdout)}
    assert rows.keys() == {row.model_type for row in model_table()}
    assert rows["lfm2"]["supported"] is True
    assert rows["lfm2"]["layer_kinds"][0] == "gated short convolution"
    assert rows["deepseek_v32"]["supported"] is False
    assert "indexer" in rows["deepseek_v32"]["reason"]


def test_the_screen_names_every_supported_type():
    result = CliRunner().invoke(app, ["models"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    for name in supported_types():
        assert name in result.output
    assert "known model types run on trees" in result.output


def test_help_teaches():
    result = CliRunner().invoke(app, ["models", "--help"])
    assert result.exit_code == 0
    for words in ("--json", "flat_only=True", "harts/models/families", "model_type"):
        assert words in result.output
