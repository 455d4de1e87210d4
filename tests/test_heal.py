"""`surgery heal`, end to end on tiny models: trained, of the same form, verified, and on record."""

import json
import subprocess
import sys

import pytest
import torch
from command_line import run_main
from own_models import KINDS, tiny_source
from safetensors.torch import load_file
from tiny_models import DEMO, HELD_OUT
from transformers import AutoModelForCausalLM

from surgery import heal
from surgery.architectures.entry_factors import entry_factors
from surgery.architectures.neutral_norm import recognised_norm
from surgery.checkpoint import CheckpointReader
from surgery.convert import convert_to_mla
from surgery.convert_heads import convert_to_gqa
from surgery.errors import SurgeryError
from surgery.evaluation.settings import EvalSettings
from surgery.heal import HealRequest, gap_closed, heal_checkpoint, launch_command
from surgery.progress import Progress
from surgery.recipe import run_recipe
from surgery.settings import ConvertSettings, KVHeadsSettings

FEW = {"length": 32, "batch_size": 2, "gradient_accumulation": 1, "held_out": 2, "max_steps": 3, "max_tokens": None}
FEW |= {"data": (str(HELD_OUT),), "learning_rate": 1e-2, "device": "cpu", "recall": 0.0}
MEASURE = {"windows": 2, "length": 64, "recall_prompts": 1, "data": (str(HELD_OUT),)}


@pytest.fixture
def made(checkpoints, tmp_path):
    """A source and what was converted from it."""

    def make(kind):
        source = checkpoints("llama_bias" if kind == "constant" else "llama")
        if kind == "gqa":
            settings = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none")
            return source, convert_to_gqa(source, tmp_path / kind, settings).path
        settings = ConvertSettings(kv_lora_rank=12, rope_dim=4, calibration="none", latent_norm=kind, carrier="stock")
        return source, convert_to_mla(source, tmp_path / kind, settings).path

    return make


def request(source, student, out, **given):
    return HealRequest(str(student), out, given={**FEW, "teacher": str(source), **given}, measure=None)


@pytest.mark.parametrize("kind", ["tiny", "constant"])
def test_stock_mla_stays_stock(made, tmp_path, kind):
    source, student = made(kind)
    healed = heal_checkpoint(request(source, student, tmp_path / "out"))
    before, after = load_file(student / "model.safetensors"), load_file(healed.path / "model.safetensors")
    assert type(AutoModelForCausalLM.from_pretrained(healed.path)).__name__ == "DeepseekV3ForCausalLM"
    width = json.loads((healed.path / "config.json").read_text())["kv_lora_rank"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        assert torch.equal(after[prefix + "kv_a_layernorm.weight"], before[prefix + "kv_a_layernorm.weight"])
        bias = after.get(prefix + "kv_a_proj_with_mqa.bias")
        norm = recognised_norm(after[prefix + "kv_a_layernorm.weight"], None if bias is None else bias[:width])
        assert norm.kind == kind
        weight, old = (tensors[prefix + "kv_a_proj_with_mqa.weight"][:width] for tensors in (after, before))
        assert not torch.equal(weight, old), "the latent did not train"
        # As far as a step moves a weight of usual size, in proportion to theirs.
        assert (weight - old).abs().max() <= 3 * FEW["learning_rate"] * norm.scale * 1.01
        if norm.extra:
            assert torch.equal(weight[-1], old[-1])
    assert before.keys() == after.keys()


def test_the_report_and_the_card_say_what_happened(made, tmp_path):
    source, student = made("gqa")
    asked = request(source, student, tmp_path / "out")
    healed = heal_checkpoint(HealRequest(**{**vars(asked), "measure": MEASURE}))
    report = json.loads((healed.path / "surgery_report.json").read_text())
    healing = report["healing"]
    assert [entry["name"] for entry in healing["quality"]] == ["source", "converted", "healed"]
    assert healing["steps"] == 3 and healing["tokens"] == 3 * 2 * 32
    losses = {entry["name"]: entry["loss"] for entry in healing["quality"]}
    assert losses["healed"] != losses["converted"]
    assert healing["gap_closed"] == gap_closed(healing["quality"])
    assert report["target"]["to"] == "mqa" and "teacher" not in healing["settings"]
    card = (healed.path / "README.md").read_text()
    assert "healed by distillation: 192 tokens" in card and f"| converted | {losses['converted']:.4f} |" in card
    assert not (tmp_path / "out.healing").exists()
    assert (healed.path / "heal.jsonl").read_text().count('"step"') >= 3


@pytest.mark.parametrize("kind", ["low_rank", "hybrid"])
def test_the_own_class_without_a_report(tmp_path, kind):
    with torch.no_grad():
        source = tiny_source("llama", vocab_size=4096)
        student = KINDS[kind](source)
    for model, name in ((source, "source"), (student, "student")):
        model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).write_bytes((DEMO / file).read_bytes())
    healed = heal_checkpoint(request(tmp_path / "source", tmp_path / "student", tmp_path / "out"))
    assert healed.healing["verification"]["kv_bytes_per_token"] > 0
    assert (healed.path / "surgery_healing.json").exists()
    config = json.loads((healed.path / "config.json").read_text())
    assert (
        config["attention_layers"] == json.loads((tmp_path / "student" / "config.json").read_text())["attention_layers"]
    )


def test_a_failed_training_leaves_no_checkpoint_and_the_next_one_goes_on(made, tmp_path, monkeypatch):
    source, student = made("gqa")
    run = subprocess.run
    monkeypatch.setattr(heal.subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 7))
    with pytest.raises(SurgeryError, match="exit code 7"):
        heal_checkpoint(request(source, student, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(heal.subprocess, "run", run)
    assert heal_checkpoint(request(source, student, tmp_path / "out")).path.is_dir()


def test_a_finished_training_is_not_repeated(made, tmp_path, monkeypatch):
    source, student = made("gqa")
    refuse = pytest.MonkeyPatch()

    def broken(*_):
        raise SurgeryError("verification failed")

    refuse.setattr(heal, "verify_healed", broken)
    with pytest.raises(SurgeryError, match="verification failed"):
        heal_checkpoint(request(source, student, tmp_path / "out"))
    refuse.undo()
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(heal.subprocess, "run", lambda *_, **__: pytest.fail("trained again"))
    assert heal_checkpoint(request(source, student, tmp_path / "out")).path.is_dir()


def test_a_recipe_heals_once(made, tmp_path, monkeypatch):
    source, student = made("gqa")
    step = {"name": "healed", "student": str(student), "teacher": str(source), **FEW, "data": [str(HELD_OUT)]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"steps": [{"heal": step}]}))
    monkeypatch.setattr(heal, "EvalSettings", lambda **given: EvalSettings(**given, **MEASURE))
    run_recipe(path, tmp_path / "work", Progress(silent=True))
    assert json.loads((tmp_path / "work" / "healed" / "heal.json").read_text())["steps"] == 3
    monkeypatch.setattr(heal.subprocess, "run", lambda *_, **__: pytest.fail("trained again"))
    assert run_recipe(path, tmp_path / "work", Progress(silent=True)).checkpoints == {
        "healed": tmp_path / "work" / "healed"
    }
    path.write_text(json.dumps({"steps": [{"heal": {**step, "max_steps": 4}}]}))
    with pytest.raises(SurgeryError, match="other settings"):
        run_recipe(path, tmp_path / "work", Progress(silent=True))


def test_refusals_come_before_training(made, tmp_path, monkeypatch, capsys):
    source, student = made("gqa")
    monkeypatch.setattr(heal.subprocess, "run", lambda *_, **__: pytest.fail("trained"))
    (tmp_path / "out").mkdir()
    with pytest.raises(SurgeryError, match="--overwrite"):
        heal_checkpoint(request(source, student, tmp_path / "out"))
    with pytest.raises(SurgeryError, match="replace its own source"):
        heal_checkpoint(request(source, student, student))
    with pytest.raises(SurgeryError, match="learning_rate"):
        heal_checkpoint(request(source, student, tmp_path / "other", learning_rate=-1.0))


def test_entry_factors_are_for_stock_mla_alone(made):
    assert entry_factors(CheckpointReader.open(made("gqa")[1])) == {}


def test_the_command_that_is_composed(tmp_path):
    config, launcher = tmp_path / "heal.yaml", tmp_path / "fsdp2.yaml"
    module = ["-m", "surgery.training.heal", "--config", str(config)]
    assert launch_command(config, 1, None, "cpu") == [sys.executable, *module]
    many = launch_command(config, 2, None, "auto")
    assert many[1:3] == ["-m", "accelerate.commands.launch"] and many[-4:] == module and "2" in many
    assert launch_command(config, 1, launcher, "auto")[3:5] == ["--config_file", str(launcher)]


def test_the_share_of_the_gap():
    def quality(source, converted, healed):
        named = {"source": source, "converted": converted, "healed": healed}
        return [{"name": name, "loss": loss} for name, loss in named.items()]

    assert gap_closed(quality(2.0, 3.0, 2.25)) == 0.75
    assert gap_closed(quality(2.0, 2.0, 1.9)) is None
    assert gap_closed([]) is None


def test_errors_are_one_line(tmp_path, monkeypatch, capsys):
    code, out, err = run_main(monkeypatch, capsys, "heal", str(tmp_path / "nowhere"), "--teacher", str(DEMO))
    assert code == 1 and not out and err.startswith("surgery: error:") and len(err.splitlines()) == 1
