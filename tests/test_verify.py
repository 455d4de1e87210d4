"""`surgery verify`: good checkpoints pass, and what was changed since they were written is found and named."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from command_line import run_main
from config_files import edit_config
from hostile import cases
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import SHORT_TEXT

import surgery
from surgery.checkpoint.file_hashes import hash_files
from surgery.inspection import checks
from surgery.inspection.checks import FAILED, NOT_CHECKED, PASSED, verify_checkpoint
from surgery.structures.registry import find_target
from surgery.verification.record import Recorded, compare_files

OLD = Path(__file__).with_name("old_checkpoints")
KINDS = {"mla": {"kv_ratio": 0.5}, "gqa": {"kv_heads": 1}, "lowrank": {"kv_ratio": 0.2, "bits": "auto"}}


@pytest.fixture
def converted(conversions):
    return lambda kind: conversions("llama", find_target(kind).settings({**SHORT_TEXT, **KINDS[kind]})).path


@pytest.fixture
def copy(converted, tmp_path):
    return lambda kind: shutil.copytree(converted(kind), tmp_path / kind)


def outcomes(path):
    return {check.name: check.outcome for check in verify_checkpoint(path, device="cpu").checks}


def files_of(path):
    """Return verify's checks of the files alone, without running them."""
    report = Recorded.in_folder(path)
    return checks._check("files", lambda: checks._files(report, compare_files(path, report.files)))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_passes(converted, kind):
    assert set(outcomes(converted(kind)).values()) == {PASSED}


def test_a_card_may_be_edited(copy):
    path = copy("gqa")
    (path / "README.md").write_text("mine")
    assert set(outcomes(path).values()) == {PASSED}


def test_what_no_download_brings_may_be_missing(copy):
    path = copy("gqa")
    report = json.loads((path / "surgery_report.json").read_text())
    assert report["files"] == hash_files(path)
    report["files"]["heal.jsonl"] = "of a log that lies with the original alone"
    (path / "surgery_report.json").write_text(json.dumps(report))
    assert files_of(path).outcome == PASSED
    (path / "heal.jsonl").write_text("{}")
    assert files_of(path).outcome == FAILED


def test_weights_of_an_adapter_that_earlier_reports_do_not_list_are_named(copy):
    path = copy("gqa")
    (path / "adapter").mkdir()
    (path / "adapter" / "adapter_model.safetensors").write_text("")
    check = files_of(path)
    assert check.outcome == PASSED and "adapter/adapter_model.safetensors" in check.message


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
    for keys, value in damages:
        document = inner = json.loads(whole)
        for name in keys[:-1]:
            inner = inner[name]
        inner[keys[-1]] = value
        report.write_text(json.dumps(document))
        with pytest.raises(surgery.SurgeryError, match="damaged"):
            Recorded.in_folder(path)
    assert outcomes(path)["report"] == FAILED
    document = json.loads(whole)
    document["probe"]["tokens"][0] = 10**9
    report.write_text(json.dumps(document))
    assert outcomes(path)["logits"] == FAILED


def flip(path):
    """One bit of one number."""
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def swap(path):
    """Two tensors of one shape are swapped."""
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
        (flip, "files", "model.safetensors was changed after it was written"),
        (swap, "logits", "differ from the report's"),
        (
            partial(edit_config, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
            "logits",
            "differ from the report's",
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
    assert words in checks[caught].message
    code, output, errors = run_main(monkeypatch, capsys, "verify", path, "--device", "cpu")
    assert code == 1 and "failed" in output
    assert errors.splitlines()[-1].startswith(f"surgery: error: {path}: ")


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "words"),
    [(partial(edit_config, num_key_value_heads=2), "k_proj.weight has shape"), (truncate, "model.safetensors")],
)
def test_what_cannot_be_read_is_one_line(copy, damage, words, monkeypatch, capsys):
    path = copy("gqa")
    damage(path)
    code, output, errors = run_main(monkeypatch, capsys, "verify", path)
    assert (code, output) == (1, "") and words in errors.splitlines()[-1]


READ = ("modeling_evil.py", "code.PY", "x.so", "x.so.1", "lib.dll", "a/b/m.pyc", "custom_generate/generate.txt")
READ += ("pytorch_model.bin", "model-00002.safetensors", "m.gguf", "optimizer.pt", "Model.SAFETENSORS", "sub/w.pth")
READ += ("chat_template.jinja", "additional_chat_templates/rag.jinja", "chat_template.json", "added_tokens.json")
READ += ("special_tokens_map.json", "preprocessor_config.json", ".hidden.py", ".cache/x.bin", "README.so")
NAMED = ("notes.txt", "LICENSE", ".env", ".gitattributes", "wandb/debug.log", "trainer_state.json", "data/t.jsonl")


@pytest.mark.parametrize("linked", [False, True])
def test_unlisted_files_that_loading_reads_are_refused(copy, linked):
    """Remote code and templates that were added to a result."""
    path = copy("gqa")
    for name in READ:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to("/nowhere") if linked else file.write_text("x")
        check = files_of(path)
        assert check.outcome == FAILED and name in check.message
        file.unlink()


def test_linked_folders_are_one_entry(copy):
    path = copy("gqa")
    (path / "additional_chat_templates").symlink_to("/etc")
    check = files_of(path)
    assert check.outcome == FAILED and "additional_chat_templates/ (template)" in check.message


def test_other_unlisted_files_are_named(copy, monkeypatch, capsys):
    path = copy("gqa")
    for name in (*NAMED, *(f".git/objects/{number}.py" for number in range(9))):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    code, output, _ = run_main(monkeypatch, capsys, "verify", path, "--json", "--device", "cpu")
    document = json.loads(output)
    assert code == 0 and document["unlisted"].keys() == {*NAMED, ".git/"}
    message = next(check["message"] for check in document["checks"] if check["name"] == "files")
    assert all(name in message for name in NAMED) and message.count(".git") == 2  # .gitattributes
    (path / "chat_template.jinja").write_text("x")
    code, output, err = run_main(monkeypatch, capsys, "verify", path, "--json", "--device", "cpu")
    assert code == 1 and json.loads(output)["unlisted"]["chat_template.jinja"] == "template"
    assert "chat_template.jinja (template)" in err and "wandb/debug.log" in err


@given(st.lists(st.sampled_from((*READ, *NAMED)), unique=True))
@cases(20)
def test_verify_passes_nothing_that_is_not_on_the_list(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("listed")
    (path / "config.json").write_text("{}")
    listed = hash_files(path)
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    compared = compare_files(path, listed)
    assert compared.unlisted.keys() == {*names} and compared.refused.keys() == {*names} & {*READ}
    assert not compared.changed and not compared.missing


def test_files_replaced_while_they_are_verified_are_refused(copy, monkeypatch):
    path = copy("gqa")
    look = checks._whole

    def replaced(*arguments):
        (path / "generation_config.json").write_text("{}")
        return look(*arguments)

    monkeypatch.setattr(checks, "_whole", replaced)
    with pytest.raises(surgery.SurgeryError, match=r"generation_config.json: was changed while it was read"):
        verify_checkpoint(path, device="cpu")


@pytest.mark.parametrize(
    "kind",
    [
        "hybrid",
        "quantized",
        *(pytest.param(p.name, marks=pytest.mark.slow) for p in sorted(OLD.iterdir()) if p.is_dir()),
    ],
)
def test_what_no_report_says_is_not_checked(kind):
    result = outcomes(OLD / kind)
    assert result.pop("files") == result.pop("KV bytes") == result.pop("logits") == NOT_CHECKED
    assert set(result.values()) <= {PASSED}


def test_the_verb_and_the_function(converted, checkpoints, monkeypatch, capsys):
    code, output, _ = run_main(monkeypatch, capsys, "verify", converted("mla"), "--json", "--device", "cpu")
    assert code == 0 and json.loads(output)["failed"] is False
    assert not surgery.verify(converted("mla"), device="cpu", progress=False).failed
    untouched = surgery.verify(checkpoints("qwen3"), device="cpu", progress=False)
    assert {check.name for check in untouched.checks if check.outcome == PASSED} == {"numbers", "caches", "whole model"}


def test_doctor_without_a_checkpoint_tells_versions_and_no_paths(monkeypatch, capsys):
    code, output, _ = run_main(monkeypatch, capsys, "doctor", "--json")
    facts = json.loads(output)
    assert code == 0 and facts["surgery"] and facts["packages"]["torch"] and "/" not in json.dumps(facts["packages"])
    code, output, _ = run_main(monkeypatch, capsys, "doctor", "--gpu")
    assert code == 0 and "transformers" in output
