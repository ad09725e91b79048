"""The table of model types: complete, true to what `prepare` accepts, and free of contradictions."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from harts.models import registry
from harts.models.registry import FAMILIES, REFUSED, TEXT_TYPES, family_of_type, model_table, supported_types


def test_every_known_type_has_one_row():
    rows = model_table()
    assert [row.model_type for row in rows] == sorted({*FAMILIES, *TEXT_TYPES, *REFUSED})
    assert not FAMILIES.keys() & REFUSED.keys()
    assert set(TEXT_TYPES.values()) <= {*FAMILIES, *REFUSED}


def test_rows_are_what_asking_for_a_family_gives():
    for row in model_table():
        if row.supported:
            assert row.layer_kinds == family_of_type(row.model_type)[1].layer_kinds != ()
        else:
            assert row.reason
            with pytest.raises(ValueError, match=row.model_type):
                family_of_type(row.model_type)
    assert {row.model_type for row in model_table() if row.supported} >= set(supported_types())


def test_refusals_give_the_reason():
    with pytest.raises(ValueError, match="'recurrent_gemma' does not run on trees \\(RG-LRU layers"):
        family_of_type("recurrent_gemma")
    with pytest.raises(ValueError, match="'llama4' does not run on trees \\(attention within chunks"):
        family_of_type("llama4")


def test_a_family_that_the_installed_transformers_lacks_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(registry.FAMILIES, "llama99", "llama")
    row = next(row for row in model_table() if row.model_type == "llama99")
    assert (row.supported, row.layer_kinds) == (False, ())
    assert "has no llama99" in row.reason
    assert "llama99" not in CONFIG_MAPPING
