"""`surgery verify`: good checkpoints pass, and what was changed since they were written is found and named."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from command_line import run_main
from config_files import edit_config
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT

import surgery
from surgery.checkpoint.file_hashes import hash_files
from surgery.inspection.checks import FAILED, NOT_CHECKED, PASSED, verify_checkpoint
from surgery.structures import converter
from surgery.structures.registry import find_target
from surgery.verification.record import Recorded

OLD = Path(__file__).with_name("old_checkpoints")
TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
KINDS = {
    "mla": {"kv_ratio": 0.5, "fit_steps": 0},
    "gqa": {"kv_heads": 1, "fit_steps": 0},
    "lowrank": {"kv_ratio": 0.5, "fit_steps": 0, "bits": 8, "group": 4},
}


@pytest.fixture(scope="module")
def made(checkpoints, tmp_path_factory):
    found = {}

    def get(kind):
        if kind not in found:
            out = tmp_path_factory.mktemp("made") / kind
            settings = find_target(kind).settings({**TEXT, **KINDS[kind]})
            found[kind] = converter.convert(checkpoints("llama"), out, settings).path
        return found[kind]

    return get


@pytest.fixture
def copy(made, tmp_path):
    return lambda kind: shutil.copytree(made(kind), tmp_path / kind)


def outcomes(path):
    return {check.name: check.outcome for check in verify_checkpoint(path, device="cpu").checks}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_passes(made, kind):
    assert set(outcomes(made(kind)).values()) == {PASSED}


def test_a_card_may_be_edited(copy):
    path = copy("gqa")
    (path / "README.md").write_text("mine")
    assert set(outcomes(path).values()) == {PASSED}


def test_what_no_download_brings_is_no_part_of_it(copy):
    path = copy("gqa")
    report = json.loads((path / "surgery_report.json").read_text())
    (path / "heal.jsonl").write_text("{}")
    assert "heal.jsonl" not in hash_files(path) and report["files"] == hash_files(path)
    report["files"]["heal.jsonl"] = "of a report that lists it"
    (path / "surgery_report.json").write_text(json.dumps(report))
    assert set(outcomes(path).values()) == {PASSED}


def test_bases_of_prompts_take_the_bytes_of_the_report(checkpoints, tmp_path):
    asked = {"to": "crosslayer", "method": "xkv-prompt", "kv_ratio": 0.5, "calibration": "none", "progress": False}
    made = surgery.convert(checkpoints("llama"), out=tmp_path / "out", **asked)
    found = outcomes(made.path)
    assert found["KV bytes"] == PASSED and FAILED not in found.values()


def test_a_damaged_report_is_a_fault_and_no_traceback(copy):
    path = copy("gqa")
    report = path / "surgery_report.json"
    whole = report.read_text()
    damages = [
        (("files",), ["a"]),
        (("probe",), {}),
        (("probe", "tokens"), []),
        (("probe", "tokens"), [1] * 10**6),
        (("probe", "tokens"), "ab"),
        (("probe", "logits"), ["a"]),
        (("probe", "piece"), 0),
        (("probe", "dtype"), "nn"),
        (("probe", "spread"), None),
        (("kv",), 3),
        (("kv", "measured_at_tokens"), 10**9),
        (("kv", "measured_bytes_per_token"), "x"),
    ]
    for place, value in damages:
        said = inner = json.loads(whole)
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
        report.write_text(json.dumps(said))
        with pytest.raises(surgery.SurgeryError, match="damaged"):
            Recorded.beside(path)
    assert outcomes(path)["report"] == FAILED
    said = json.loads(whole)
    said["probe"]["tokens"][0] = 10**9
    report.write_text(json.dumps(said))
    assert outcomes(path)["logits"] == FAILED


def flip(path):
    """One bit of one number."""
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def swap(path):
    """Two tensors of one shape change places."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    tensors |= {names[0]: tensors[names[1]].clone(), names[1]: tensors[names[0]].clone()}
    save_file(tensors, file, {"format": "pt"})


def forget_hashes(path):
    """Whoever changes files can change the report too; logits remain."""
    file = path / "surgery_report.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": None}))


@pytest.mark.parametrize(
    ("damage", "caught", "words"),
    [
        (flip, "files", "model.safetensors is not the file that was written"),
        (swap, "logits", "differ from those on record"),
        (
            partial(edit_config, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            "logits",
            "differ from those on record",
        ),
    ],
)
def test_damage_is_found(copy, damage, caught, words, monkeypatch, capsys):
    path = copy("gqa")
    damage(path)
    assert outcomes(path)["files"] == FAILED
    if caught != "files":
        forget_hashes(path)
    checks = {check.name: check for check in verify_checkpoint(path, device="cpu").checks}
    assert checks[caught].outcome == FAILED
    assert pytest.importorskip("re").search(words, checks[caught].said)
    code, shown, errors = run_main(monkeypatch, capsys, "verify", path, "--device", "cpu")
    assert code == 1 and "failed" in shown
    assert errors.splitlines()[-1].startswith(f"surgery: error: {path}: ")


def test_a_config_of_other_shapes_is_one_line(copy, monkeypatch, capsys):
    path = copy("gqa")
    edit_config(path, num_key_value_heads=2)
    code, shown, errors = run_main(monkeypatch, capsys, "verify", path)
    assert (code, shown) == (1, "") and "k_proj.weight has shape" in errors.splitlines()[-1]


def test_a_truncated_file_is_one_line(copy, monkeypatch, capsys):
    path = copy("gqa")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, shown, errors = run_main(monkeypatch, capsys, "verify", path)
    assert (code, shown) == (1, "") and "model.safetensors" in errors.splitlines()[-1]


def test_code_that_nobody_wrote_is_found(copy):
    path = copy("gqa")
    (path / "modeling_evil.py").write_text("")
    assert outcomes(path)["files"] == FAILED


@pytest.mark.parametrize(
    "kind",
    [
        "hybrid",
        "quantized",
        *(pytest.param(p.name, marks=pytest.mark.slow) for p in sorted(OLD.iterdir()) if p.is_dir()),
    ],
)
def test_what_no_report_says_is_not_checked(kind):
    found = outcomes(OLD / kind)
    assert found.pop("files") == found.pop("KV bytes") == found.pop("logits") == NOT_CHECKED
    assert set(found.values()) <= ({NOT_CHECKED, PASSED} if kind == "xkv-prompt" else {PASSED})


def test_the_verb_and_the_function(made, checkpoints, monkeypatch, capsys):
    code, shown, _ = run_main(monkeypatch, capsys, "verify", made("mla"), "--json", "--device", "cpu")
    assert code == 0 and json.loads(shown)["failed"] is False
    assert not surgery.verify(made("mla"), device="cpu", progress=False).failed
    untouched = surgery.verify(checkpoints("qwen3"), device="cpu", progress=False)
    assert {check.name for check in untouched.checks if check.outcome == PASSED} == {"numbers", "caches", "whole model"}


def test_env_tells_versions_and_no_paths(monkeypatch, capsys):
    code, shown, _ = run_main(monkeypatch, capsys, "env", "--json")
    facts = json.loads(shown)
    assert code == 0 and facts["surgery"] and facts["packages"]["torch"] and "/" not in json.dumps(facts["packages"])
    code, shown, _ = run_main(monkeypatch, capsys, "env", "--gpu")
    assert code == 0 and "transformers" in shown
