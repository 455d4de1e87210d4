"""Verbs on GGUF files: they become whole checkpoints, and every record names what they were dequantized from."""

import json

import pytest
from command_line import listing, run_main
from gguf_files import make_model, write_gguf
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.output_path import default_output
from surgery.healing.heal import HealRequest, training_settings

pytestmark = pytest.mark.usefixtures("short_decoding", "no_pictures")

QUICK = ["--calibration", HELD_OUT, "--calibration-tokens", 512, "--calibration-length", 128, "--held-out", 1]
QUICK += ["--kv-ratio", 0.5, "--device", "cpu"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("source") / "tiny.Q8_0.gguf", make_model("llama"), "Q8_0", tokenizer=True)


def test_inspect(source, monkeypatch, capsys):
    code, printed, _ = run_main(monkeypatch, capsys, "inspect", source)
    assert code == 0 and "dequantized from Q8_0" in printed
    _, printed, _ = run_main(monkeypatch, capsys, "inspect", source.parent, "--json")
    assert json.loads(printed)["architecture"]["dequantised_from"] == "Q8_0"


def test_convert_and_eval(source, tmp_path, monkeypatch, capsys):
    copied = tmp_path / source.name
    copied.write_bytes(source.read_bytes())
    before = copied.read_bytes()
    code, printed, _ = run_main(monkeypatch, capsys, "convert", "--to", "mla", copied, "--carrier", "stock", *QUICK)
    assert code == 0 and "tiny.Q8_0.gguf (dequantized from Q8_0) → tiny.Q8_0-mla" in printed
    out = tmp_path / "tiny.Q8_0-mla"
    assert out == default_output(copied, "mla")
    assert copied.read_bytes() == before
    expected = ["README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"]
    assert listing(out) == [*expected, "surgery_report.json", "tokenizer.json", "tokenizer_config.json"]
    assert "gguf" not in (out / "config.json").read_text() + (out / "tokenizer_config.json").read_text()
    record = json.loads((out / "surgery_report.json").read_text())["source"]
    assert record["path"] == "tiny.Q8_0.gguf" and record["dequantised_from"] == "Q8_0"
    assert "tiny.Q8_0.gguf (dequantized from Q8_0) with its attention rewritten" in (out / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    text = tokenizer("def f(x):", return_tensors="pt").input_ids
    assert model.generate(text, max_new_tokens=2, do_sample=False).shape[1] == text.shape[1] + 2

    quick = ["--tasks", "loss", "--windows", 1, "--length", 64, "--device", "cpu", "--variants", "none"]
    report = tmp_path / "report"
    code, _, err = run_main(monkeypatch, capsys, "eval", out, "--baseline", copied, "--out", report, *quick)
    assert code == 0, err
    rows = json.loads((report / "report.json").read_text())["rows"]
    assert {row["path"] for row in rows} == {"tiny.Q8_0-mla", "tiny.Q8_0.gguf (dequantized from Q8_0)"}


def test_the_output_may_not_replace_the_file(source, monkeypatch, capsys):
    arguments = ["convert", "--to", "mla", source, *QUICK, "--out", source.parent, "--overwrite"]
    code, _, err = run_main(monkeypatch, capsys, *arguments)
    assert code == 1 and "contains its source" in err


def test_a_healing_is_given_the_file_itself(source, tmp_path):
    # Its training runs in other processes, which cannot know this one's temporary folder.
    student = CheckpointReader.open(source)
    request = HealRequest(str(source), None, None, {"teacher": str(source)})
    settings = training_settings(request, student, tmp_path)
    assert settings.teacher == settings.student == str(source)
