"""Reports as documents: comparison with the baseline, and what may be merged."""

import copy
import json

import pytest

from surgery.common.errors import SurgeryError
from surgery.eval.report.document import SCHEMA, finish, merge, read_report

LOSSES = [1.0, 1.1, 1.2]


def row(name, sha256, losses, *, role="checkpoint", values=1000, **results):
    loss = {"loss": sum(losses) / len(losses), "per_sequence": losses}
    facts = {"name": name, "role": role, "sha256": sha256, "variant": None, "kv": {"held_bytes": values}}
    return {**facts, "results": {"loss": loss, **results}, "seconds": {"loss": 1.0}}


def report(rows, baseline="source", **settings):
    results = {"schema": SCHEMA, "created": "2026-11-20T20:00:00+00:00", "command": "surgery eval"}
    settings = {"seed": 0, "limit": None, "batch_size": 8, "dtype": "float32", "device": "cpu", **settings}
    results |= {"settings": settings, "environment": {"torch": "2.13"}, "tokenizer": {"sha256": "t"}}
    tasks = {"loss": {"data_sha256": "d", "windows": 3}}
    return finish({**results, "tasks": tasks, "baseline": baseline, "rows": rows})


def source():
    return row("source", "s", [2.0, 2.1, 2.2], role="baseline")


def test_rows_are_compared_with_the_baseline_sample_by_sample():
    hits = {"recall": {"hits": [1, 0, 0]}}
    result = report([source(), row("half", "h", [2.1, 2.2, 2.3], values=500, **hits)])
    base, half = result["rows"]
    assert base["comparison"] is None and base["kv"]["ratio"] == 1
    assert half["kv"]["ratio"] == 0.5
    # The baseline has no recall, so only the loss is compared.
    assert list(half["comparison"]) == ["loss"]
    assert half["comparison"]["loss"]["difference"] == pytest.approx(0.1)
    assert half["comparison"]["loss"]["low"] == pytest.approx(0.1)


def test_without_baseline_nothing_is_compared():
    result = report([row("half", "h", [2.0])], baseline=None)
    assert result["rows"][0]["comparison"] is None and result["rows"][0]["kv"]["ratio"] is None


def test_reports_of_different_times_merge():
    first = report([source(), row("half", "h", [2.1, 2.2, 2.3], values=500)])
    second = report([row("quarter", "q", [2.5, 2.6, 2.7], values=250)], baseline=None)
    third = report([source(), row("half", "h", [9, 9, 9], values=500, recall={"hits": [1], "accuracy": 1.0})])
    third["tasks"]["recall"] = {"prompts": 1}
    before = copy.deepcopy(first)
    merged = merge([first, second, third], ["a", "b", "c"])
    assert first == before
    assert [entry["name"] for entry in merged["rows"]] == ["source", "half", "quarter"]
    # A later report adds what is new of a row and replaces nothing.
    assert merged["rows"][1]["results"]["loss"]["per_sequence"] == [2.1, 2.2, 2.3]
    assert merged["rows"][1]["results"]["recall"]["accuracy"] == 1.0
    # What had no baseline of its own has that of the others now.
    assert merged["rows"][2]["comparison"]["loss"]["difference"] == pytest.approx(0.5)
    assert merged["rows"][2]["kv"]["ratio"] == 0.25
    assert set(merged["tasks"]) == {"loss", "recall"}
    assert [part["report"] for part in merged["merged_from"]] == ["a", "b", "c"]


def changed(key, value):
    other = report([row("other", "o", [2.0, 2.0, 2.0])], baseline=None)
    if key == "data":
        other["tasks"]["loss"]["data_sha256"] = value
    elif key == "tokenizer":
        other["tokenizer"] = {"sha256": value}
    else:
        other["settings"][key] = value
    return other


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", 1, "b: seed is 1, in a it is 0"),
        ("limit", 5, "limit is 5"),
        ("dtype", "bfloat16", "dtype"),
        ("device", "cuda", "device"),
        ("batch_size", 4, "batch_size"),
        ("data", "e", r"task loss was measured with other settings or data \(data_sha256\)"),
        ("tokenizer", "u", "another tokenizer"),
    ],
)
def test_other_data_or_settings_are_refused(key, value, message):
    with pytest.raises(SurgeryError, match=message):
        merge([report([source()]), changed(key, value)], ["a", "b"])


def test_one_name_or_baseline_for_two_models_is_refused():
    with pytest.raises(SurgeryError, match="half is another model"):
        merge([report([source(), row("half", "h", LOSSES)]), report([row("half", "x", LOSSES)], None)], ["a", "b"])
    other = report([row("base", "b", [1.0, 1.0, 1.0], role="baseline")], baseline="base")
    with pytest.raises(SurgeryError, match="its baseline base is another model"):
        merge([report([source()]), other], ["a", "b"])


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "not a report"), ('{"schema": 1}', "not a report"), (None, "No such file")],
)
def test_what_is_no_report_is_refused(tmp_path, content, message):
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SurgeryError, match=message):
        read_report(path)


def test_other_schemas_are_refused_and_folders_are_read(tmp_path):
    result = report([source()])
    (tmp_path / "report.json").write_text(json.dumps(result))
    assert read_report(tmp_path) == result
    (tmp_path / "report.json").write_text(json.dumps({**result, "schema": 99}))
    with pytest.raises(SurgeryError, match="schema 99"):
        read_report(tmp_path)
