"""A package of somebody else is installed apart, and its things are reached like the project's own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import ROOT, Fork
from safetensors.torch import load_file
from tiny_models import EXPERTS, SHAPE, add_tokenizer, random_model
from transformers import GraniteMoeSharedConfig

import surgery
from surgery.common import plugins
from surgery.common.errors import SurgeryError
from surgery.common.plugins import Registry, added

PACKAGE = ROOT / "tests" / "plugin_package"
# One process for all commands.
SCRIPT = """
import contextlib, io, json, sys
sys.argv[0] = "surgery"
from surgery.cli.program import main
found = {}
for name, arguments in json.loads(sys.stdin.read()).items():
    sys.argv[1:] = arguments
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder that the package is installed in."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, tmp_path_factory.mktemp("package") / "package")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder, source], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def runs(installed, tmp_path_factory):
    """Return the result of each command: exit code, standard output, standard error."""
    work = tmp_path_factory.mktemp("work")
    source = work / "granite"
    random_model(GraniteMoeSharedConfig(**SHAPE, **EXPERTS, num_local_experts=4)).save_pretrained(source)
    add_tokenizer(source)
    small = ["--device", "cpu"]
    first = ["convert", "--to", "first-heads", str(source), "--calibration", "none", *small]
    scored = ["--out", str(work / "h.safetensors"), *small, "--json"]
    heads = ["--kv-heads", "1", "--calibration", "none", *small, "--json"]
    windows = ["--windows", "3", "--length", "32", "--variants", "none", *small, "--json"]
    report = ["--out", str(work / "report")]
    commands = {
        "help": ["convert", "--help-all"],
        "inspect": ["inspect", str(source)],
        "methods": ["convert", "--to", "gqa", "--help"],
        "method": ["convert", "--to", "gqa", str(source), "--method", "first-of-group", *heads],
        "family and structure": [*first, "--keep-heads", "1", "--out", str(work / "first")],
        "dry run": [*first, "--keep-heads", "1", "--dry-run"],
        "refused": [*first, "--keep-heads", "3"],
        "another's setting": [*first, "--rank", "3"],
        "a setting that does not apply": [*first, "--kv-ratio", "0.5"],
        "family, custom class": ["convert", "--to", "lowrank", str(source), "--calibration", "none", *small, "--json"],
        "scorer": ["heads", str(source), "--method", "key-size", "--sinks", "4", "--window", "16", *scored],
        "task": ["eval", str(work / "first"), "--baseline", str(source), "--tasks", "loss,entropy", *windows, *report],
    }
    wide = {"COLUMNS": "200", "TERM": "dumb"}
    result = Fork(code=SCRIPT, stdin=json.dumps(commands), path=(installed, ROOT), environment=wide)
    assert result.wait() == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]) | {"source": source, "converted": work / "first"}


def test_a_structure_is_a_target_with_its_options(runs):
    code, output, _ = runs["help"]
    words = " ".join(output.replace("│", " ").split())  # without the line breaks of its table
    assert code == 0 and "first-heads (drops KV heads)" in words and "--keep-heads" in words


def test_what_it_can_become_has_the_structure_too(runs):
    code, output, err = runs["inspect"]
    assert code == 0, err
    assert re.findall(r"--to first-heads --keep-heads 1 (.*?);", output) == ["(50.0%): a bad idea"]


def test_a_method_is_one_of_the_structures(runs):
    code, output, _ = runs["methods"]
    assert code == 0 and "first-of-group" in output
    code, printed, err = runs["method"]
    assert code == 0, err
    report = json.loads(printed)
    assert report["target"]["method"] == "first-of-group" and report["settings"]["method"] == "first-of-group"
    # The first of two heads stays as it was, bit for bit.
    entries, whole = (
        load_file(Path(folder) / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
        for folder in (report["path"], runs["source"])
    )
    assert torch.equal(entries, whole[: len(entries)])


def test_a_family_and_a_structure_convert(runs):
    code, output, err = runs["family and structure"]
    assert code == 0 and "kept heads" in output, err
    report = json.loads((runs["converted"] / "surgery_report.json").read_text())
    assert report["target"]["called"] == "attention that reads the first KV heads only"
    assert report["kv"]["ratio"] == 0.5 and report["source"]["model_type"] == "granitemoeshared"
    assert report["kv"]["measured_bytes_per_token"] == report["kv"]["predicted_bytes_per_token"]
    assert "attention that reads the first KV heads only" in (runs["converted"] / "README.md").read_text()
    code, output, err = runs["dry run"]
    assert code == 0 and "50.0%" in output, err


def test_its_refusals_are_one_line(runs):
    for name, entry in (
        ("refused", "--keep-heads 3 does not divide 2"),
        ("another's setting", "--rank is for lowrank"),
        ("a setting that does not apply", "--kv-ratio"),
    ):
        code, _, err = runs[name]
        assert code == 1 and entry in err and "Traceback" not in err


def test_a_family_takes_the_custom_class_too(runs):
    code, printed, err = runs["family, custom class"]
    assert code == 0, err
    assert json.loads(printed)["target"]["model_type"] == "surgery"


def test_a_scorer_is_a_method(runs):
    code, printed, err = runs["scorer"]
    assert code == 0, err
    assert json.loads(printed)["method"] == "key-size"


def test_a_task_is_measured_compared_and_shown(runs):
    code, printed, err = runs["task"]
    assert code == 0, err
    report = json.loads(printed)
    row = next(row for row in report["rows"] if row["name"] != report["baseline"])
    assert row["results"]["entropy"]["headline"]["value"] > 0
    assert "text_sha256" in report["tasks"]["entropy"]
    assert row["comparison"]["entropy"]["low"] <= row["comparison"]["entropy"]["high"]


def test_a_program_registers_without_a_package():
    surgery.register_scorer("of-this-test", lambda session: None)
    try:
        assert "of-this-test" in added("scorers")
        with pytest.raises(SurgeryError, match="'of-this-test' is already registered"):
            surgery.register_scorer("of-this-test", lambda session: None)
        with pytest.raises(SurgeryError, match="'duo' is already registered"):
            surgery.register_scorer("duo", lambda session: None)
        with pytest.raises(SurgeryError, match="choose one of gqa, lowrank"):
            surgery.register_method("mla", "mine", None)
        with pytest.raises(SurgeryError, match=r".mine. is a function; wrap it in .*low_rank_methods.Method"):
            surgery.register_method("lowrank", "mine", lambda block, rank: None)
    finally:
        plugins._registered["scorers"].clear()


def test_what_cannot_be_loaded_is_one_line(monkeypatch, capsys):
    from importlib.metadata import EntryPoint

    broken = {"mine": EntryPoint("mine", "no_such_package:thing", "model_surgery.scorers")}
    monkeypatch.setattr(plugins, "_announced", lambda kind: broken)
    registry = Registry("scorers", {"own": 1})
    with pytest.raises(SurgeryError, match="scorers: 'mine' of no_such_package:thing cannot be loaded"):
        registry["mine"]
    # What does not need it goes on without.
    assert registry.working() == {"own": 1}
    assert "note: scorers: 'mine' of no_such_package:thing cannot be loaded" in capsys.readouterr().err


def test_the_package_of_a_plugin_has_its_version(installed, monkeypatch):
    monkeypatch.syspath_prepend(installed)
    plugins._announced.cache_clear()
    monkeypatch.setitem(plugins._registered, "tasks", {"mine": None})
    registry = Registry("tasks", {"loss": "module:build"})
    try:
        packages = {name: registry.distribution(name) for name in ("entropy", "mine", "loss")}
    finally:
        plugins._announced.cache_clear()
    assert packages == {"entropy": "surgery-example 1.0", "mine": None, "loss": None}


def test_what_is_of_another_class_is_one_line(monkeypatch):
    from importlib.metadata import EntryPoint

    from surgery.transforms.low_rank_methods import Method

    announced = {"mine": EntryPoint("mine", "math:sqrt", "model_surgery.low_rank_methods")}
    monkeypatch.setattr(plugins, "_announced", lambda kind: announced)
    registry = Registry("low_rank_methods", {}, Method)
    with pytest.raises(
        SurgeryError, match=r"'mine' is a builtin_.*; wrap it in surgery.*low_rank_methods.Method\(...\)"
    ):
        registry["mine"]
