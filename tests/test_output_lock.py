"""Two processes on one output: the second is refused in one line, and the first ends as if it had been alone."""

import hashlib
import pkgutil

import pytest
import yaml
from command_line import run_main
from healing import heal_settings, settings_file, trained_here
from processes import Fork
from tiny_models import HELD_OUT

from surgery.checkpoint.output_path import LOCK, output_lock
from surgery.common.errors import SurgeryError
from surgery.healing import heal as healing

pytestmark = pytest.mark.usefixtures("one_core", "short_decoding", "no_pictures")

CONVERT = ("--calibration", "none", "--kv-ratio", "0.5")
EVAL = ("--windows", "2", "--length", "64", "--tasks", "loss", "--decoded", "4", "--variants", "none")
HEADS = ("--method", "duo", "--steps", "2", "--sinks", "4", "--window", "16", "--length", "200")
HEAL = ("--teacher", "{source}", "--data", str(HELD_OUT), "--max-steps", "1", "--length", "32", "--held-out", "2")
PLAN = ("--kv-ratio", "0.5", "--allow", "quantized", "--calibration-tokens", "512", "--calibration-length", "64")
VERBS = {
    "convert": (("convert", "{source}", *CONVERT, "--out", "{out}"), "surgery.structures.stages.StageTracker.advance"),
    "eval": (("eval", "{source}", *EVAL, "--out", "{out}"), "surgery.evaluation.run._RowRunner.measure"),
    "heads": (
        ("heads", "{source}", *HEADS, "--text", str(HELD_OUT), "--out", "{out}.safetensors"),
        "surgery.heads.duo.DuoObjective.backward",
    ),
    "heal": (("heal", "{source}", *HEAL, "--no-measure", "--out", "{out}"), "surgery.healing.heal._train"),
    "plan": (
        ("plan", "{source}", *PLAN, "--held-out", "2", "--recall", "0", "--context", "256", "--out", "{out}.yaml"),
        "surgery.planning.plan.measure",
    ),
    "run": (("run", "{recipe}", "--work", "{out}"), "surgery.structures.made_already.convert_unless_made"),
}


def content(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def paths(checkpoints, tmp_path):
    """Return the paths that commands take: all but the output exist."""
    source = checkpoints("llama")
    recipe = tmp_path / "recipe.yaml"
    step = {"name": "half", "source": str(source), "kv_ratio": 0.5, "calibration": "none"}
    recipe.write_text(yaml.safe_dump({"steps": [{"convert": step}]}))
    (tmp_path / "outputs").mkdir()
    return {"source": source, "recipe": recipe, "out": tmp_path / "outputs" / "out"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_second_is_refused_and_the_first_ends_well(verb, paths, tmp_path, monkeypatch, capsys):
    command, meanwhile = VERBS[verb]
    command, outputs, seconds = [part.format(**paths) for part in command], tmp_path / "outputs", []

    def second_first(*arguments, **kwargs):
        if not seconds:
            before = content(outputs)
            seconds.append(Fork(*command, module="surgery"))
            seconds[0].wait()
            assert content(outputs) == before
        return at_work(*arguments, **kwargs)

    at_work = pkgutil.resolve_name(meanwhile)
    monkeypatch.setattr(meanwhile, second_first)
    monkeypatch.setattr(healing, "run_interruptible", trained_here)
    code, _, err = run_main(monkeypatch, capsys, *command)
    assert code == 0, err
    (second,) = seconds
    assert second.returncode == 1 and second.stdout == ""
    *_, line = second.stderr.splitlines()
    option = "--work" if verb == "run" else "--out"
    assert line.startswith("surgery: error: ") and str(paths["out"]) in line
    assert line.endswith(f"another surgery process is writing it; wait for it or choose another {option}")
    assert "Traceback" not in second.stderr
    assert not list(outputs.rglob(f"*{LOCK}"))


def test_a_training_that_goes_on_by_itself_keeps_its_folder(checkpoints, tmp_path):
    """Protect the folder of a `surgery heal` which was killed, or of a training that was started without it."""
    source = checkpoints("llama")
    values = heal_settings(tmp_path, source, source)
    run = tmp_path / "healed.run"
    run.mkdir()
    with output_lock(run):
        second = Fork("--config", settings_file(values), module="surgery.training.heal")
        assert second.wait() == 1
    *_, line = second.stderr.splitlines()
    assert line == f"surgery: {run}: another surgery process is writing it; wait for it or choose another --out"
    assert [path.name for path in run.iterdir()] == [".surgery-work"]  # the marker of a folder of unfinished work


def test_what_sigkill_leaves_of_a_lock_is_locked_by_nobody(tmp_path):
    (tmp_path / LOCK).touch()
    with output_lock(tmp_path), pytest.raises(SurgeryError, match="another surgery"), output_lock(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
