"""`surgery convert --heal`, end to end on tiny models: one command, one checkpoint, resumed after either half."""

import json
import shutil

import pytest
from command_line import run_main
from healing import trained_here
from safetensors.torch import load_file
from tiny_models import HELD_OUT

import surgery
from surgery.common.errors import SurgeryError
from surgery.common.human import seconds_of
from surgery.healing import convert_and_heal, heal
from surgery.structures import converter
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.request import ConversionRequest

pytestmark = pytest.mark.usefixtures("short_decoding")

MINUTE = {"max_seconds": 60}
MEASURE = {"windows": 2, "length": 32, "recall_prompts": 1, "data": (str(HELD_OUT),)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Trainings are of two steps of 32 tokens of a short text, in this process."""
    monkeypatch.setattr(heal, "run_interruptible", trained_here)
    few = {"max_steps": 2, "length": 32, "recall": 0.0, "learning_rate": 1e-2, "data": (str(HELD_OUT),)}
    monkeypatch.setattr(convert_and_heal, "TRAINING", convert_and_heal.TRAINING | few)
    monkeypatch.setattr(heal, "EvalSettings", lambda **given: surgery_settings(**{**given, **MEASURE}))


surgery_settings = heal.EvalSettings


def conversion(source, out, **further):
    settings = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none", device="cpu")
    return ConversionRequest(source, out, settings, **further)


def no_class(student, _):
    raise SurgeryError(f"{student.path}: no class")


def refused(*_, **__):
    pytest.fail("not refused in time")


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("300s", 300), ("300", 300), ("1h30m", 5400), (2.5, 2.5)])
def test_durations(text, seconds):
    assert seconds_of(text, "--heal") == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "5 minutes", "m5", "-5m", "nan"])
def test_other_words_are_no_duration(text):
    with pytest.raises(SurgeryError, match="--heal"):
        seconds_of(text, "--heal")


def test_the_command_leaves_one_checkpoint_with_both_stages(checkpoints, tmp_path, monkeypatch, capsys):
    source, out = checkpoints("llama"), tmp_path / "out"
    inputs = ("--to", "gqa", "--kv-heads", 1, "--method", "mean-pool", "--calibration", "none", "--device", "cpu")
    code, output, error = run_main(
        monkeypatch, capsys, "convert", source, *inputs, "--out", out, "--heal", "5m", "--json"
    )
    assert code == 0, error
    report = json.loads((out / "surgery_report.json").read_text())
    assert json.loads(output)["healing"] == report["healing"] and "--heal 5m" in report["command"]
    assert [row["name"] for row in report["healing"]["table"]] == ["source", "converted", "healed"]
    assert report["healing"]["steps"] == 2 and report["healing"]["settings"]["max_seconds"] == 300
    assert report["target"]["kv_heads"] == 1 and report["source"]["path"] == source.name
    card = (out / "README.md").read_text()
    assert "| healed |" in card and "| source |" in card
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_interrupted_it_resumes_in_either_half(checkpoints, tmp_path, monkeypatch):
    request = conversion(checkpoints("llama"), tmp_path / "out")
    monkeypatch.setattr(heal, "run_interruptible", lambda *_: 7)
    with pytest.raises(SurgeryError, match="exit code 7"):
        convert_and_heal.convert_and_heal(request, MINUTE)
    converted = tmp_path / "out.healing" / "converted"
    before = load_file(converted / "model.safetensors")
    monkeypatch.setattr(converter, "convert", refused)
    monkeypatch.setattr(heal, "run_interruptible", trained_here)

    other = ConversionRequest(request.source, request.out, KVHeadsSettings(kv_heads=1, calibration="none"))
    with pytest.raises(SurgeryError, match="other settings"):
        convert_and_heal.convert_and_heal(other, MINUTE)
    result = convert_and_heal.convert_and_heal(request, MINUTE)
    after = load_file(result.path / "model.safetensors")
    assert any(not after[name].equal(tensor) for name, tensor in before.items())
    assert not (tmp_path / "out.healing").exists()


def test_restart_discards_the_conversion(checkpoints, tmp_path, monkeypatch):
    source, out = checkpoints("llama"), tmp_path / "out"
    monkeypatch.setattr(heal, "run_interruptible", lambda *_: 7)
    with pytest.raises(SurgeryError, match="exit code 7"):
        convert_and_heal.convert_and_heal(conversion(source, out), MINUTE)
    converted, convert = [], converter.convert
    monkeypatch.setattr(converter, "convert", lambda *a, **k: converted.append(1) or convert(*a, **k))
    monkeypatch.setattr(heal, "run_interruptible", trained_here)
    convert_and_heal.convert_and_heal(conversion(source, out, restart=True), MINUTE)
    assert converted


def test_what_cannot_be_healed_is_refused_before_the_conversion(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(converter, "convert", refused)
    mute = tmp_path / "mute"
    shutil.copytree(checkpoints("llama"), mute, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SurgeryError, match="--heal trains on text"):
        convert_and_heal.convert_and_heal(conversion(mute, tmp_path / "out"), MINUTE)
    unhealable = pytest.MonkeyPatch()
    unhealable.setattr(convert_and_heal, "config_of", no_class)
    with pytest.raises(SurgeryError, match="--heal: the result: no class"):
        convert_and_heal.convert_and_heal(conversion(checkpoints("llama"), tmp_path / "out"), MINUTE)
    unhealable.undo()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(SurgeryError, match="full"):
        convert_and_heal.convert_and_heal(conversion(checkpoints("llama"), tmp_path / "full"), MINUTE)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SurgeryError, match="surgery heal --launcher"):
        convert_and_heal.convert_and_heal(conversion(checkpoints("llama"), tmp_path / "out"), MINUTE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "mute"]


def test_a_dry_run_tells_of_both(checkpoints, tmp_path, monkeypatch, capsys):
    inputs = ("--to", "mqa", "--calibration", "none", "--device", "cpu", "--out", tmp_path / "out", "--heal", "60")
    code, output, error = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), *inputs, "--dry-run", "--json")
    assert code == 0, error
    plan = json.loads(output)
    assert plan["healing"]["settings"]["max_seconds"] == 60 and plan["healing"]["estimate"]["peak_bytes"] > 0
    code, output, error = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), *inputs, "--dry-run")
    assert code == 0 and "parameters are trained" in output
    assert not list(tmp_path.iterdir())


def test_from_python_the_losses_are_of_what_was_written(checkpoints, tmp_path):
    conversion = surgery.convert(
        checkpoints("llama"), "mqa", out=tmp_path / "out", calibration="none", device="cpu", heal="1m", progress=False
    )
    measured = {row["name"]: row["loss"] for row in conversion.report["healing"]["quality"]}
    assert (conversion.loss_before, conversion.loss_after) == (measured["source"], measured["healed"])
    assert conversion.kv_ratio == 0.5
