"""Advice of `surgery inspect`: every command applies, its engine took it, and hybrids wait for their heads."""

import pytest

from surgery.console.inspection import show_inspection
from surgery.engines.verdict import LOADS, LOADS_WITH
from surgery.inspection.inspect import inspect_checkpoint


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window", "ministral_window", "mixtral"])
def test_what_is_said_can_be_done(name, checkpoints):
    inspection = inspect_checkpoint(checkpoints(name))
    selection, rows = inspection.advice, [row for row in inspection.targets if row["applies"]]
    assert selection["quality"] in rows and selection["smallest"]["applies"]
    at_limit = [row["kv_ratio_at"]["256"] for row in (selection["smallest"], *rows) if row["to"] != "hybrid"]
    assert at_limit[0] == min(at_limit)
    assert "hybrid" not in {selection["quality"]["to"], selection["smallest"]["to"]}
    for engine, row in selection["engines"].items():
        assert row in rows and row["engines"][engine]["status"] in (LOADS, LOADS_WITH)
    assert ("llama.cpp" in selection["engines"]) == (name == "llama")


def test_where_nothing_applies_nothing_is_said(checkpoints, capsys, monkeypatch):
    refused = {"applies": False, "class": None, "reasons": ["no"], "engines": {}}
    monkeypatch.setattr(
        "surgery.inspection.targets._row",
        lambda opened, target, asked, *_: {"command": "", "to": target.name, **refused},
    )
    inspection = inspect_checkpoint(checkpoints("llama"))
    assert inspection.advice == {}
    show_inspection(inspection)
    assert "recommended (" not in capsys.readouterr().out
