"""The loop in one process: the same steps however they are cut, and what ends a run."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from healing import heal_here, heal_settings, log_of, losses_of, settings_file, stopped_after
from own_models import lossless_low_rank, lossless_model, tiny_source
from safetensors.torch import load_file
from tiny_models import HELD_OUT, add_tokenizer, make_checkpoint
from transformers import AutoModelForCausalLM

from surgery.checkpoint.carried_files import CarriedFiles
from surgery.common.errors import SurgeryError
from surgery.structures.mla.settings import ConvertSettings
from surgery.training import loop
from surgery.training.distillation import Distillation
from surgery.training.guards import Interrupted, memory_errors
from surgery.training.heal import main
from surgery.training.settings import HealSettings


@pytest.fixture
def settings(tmp_path, student, teacher):
    return lambda **others: heal_settings(tmp_path, student, teacher, **{"max_steps": 4, **others})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, student, teacher) -> dict:
    """Settings of a finished run, with which others are compared."""
    values = heal_settings(tmp_path_factory.mktemp("whole"), student, teacher, max_steps=4)
    heal_here(values)
    return values


def tensors(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def test_a_healing_lowers_the_loss_and_writes_the_students_class(settings, student):
    values = settings(max_steps=12, eval_every=4, train="all", learning_rate=1e-2)
    facts = heal_here(values)
    out = Path(values["out"])
    assert facts["held_out"]["last"]["kl"] < 0.7 * facts["held_out"]["first"]["kl"]
    assert (facts["steps"], facts["tokens"], facts["ended"]) == (12, 12 * 4 * 32, "max_steps reached")
    assert json.loads((out / "heal.json").read_text())["loss"] == facts["loss"]
    before, after = tensors(student), tensors(out)
    assert {name: (each.shape, each.dtype) for name, each in after.items()} == {
        name: (each.shape, each.dtype) for name, each in before.items()
    }
    healed = AutoModelForCausalLM.from_pretrained(out)
    assert type(healed).__name__ == "LlamaForCausalLM"
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (student / name).read_bytes()
    steps = log_of(values)
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert {"loss", "kl", "learning_rate", "gradient_norm", "tokens_per_second", "memory_bytes"} <= set(steps[0])
    assert [line["step"] for line in log_of(values, "held_out")] == [0, 4, 8, 12]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_models_replaced_after_they_were_hashed_are_refused(settings, student, tmp_path, monkeypatch, name):
    """heal.json would have the hash of another student than the one that trained."""
    copy = shutil.copytree(student, tmp_path / "copy")
    values = settings(max_steps=1) | {"student": str(copy)}
    original = CarriedFiles.of.__func__

    def replaced(kind, reader, **options):
        shutil.copyfile(copy / name, copy / "new")
        (copy / "new").replace(copy / name)
        return original(kind, reader, **options)

    monkeypatch.setattr(CarriedFiles, "of", classmethod(replaced))
    with pytest.raises(SurgeryError, match=f"{name}: was changed while it was read"):
        heal_here(values)
    assert not Path(values["out"]).exists()


def test_a_healing_carries_no_stray_files(settings, student, tmp_path):
    copy = shutil.copytree(student, tmp_path / "copy")
    for stray in ("modeling_x.py", "trainer_state.json", "optimizer.pt", "notes.txt", ".env"):
        (copy / stray).write_text("{}")
    (copy / "id_rsa").symlink_to("/etc/hostname")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "modeling_x.Config"}}))
    values = settings(max_steps=1) | {"student": str(copy)}
    facts = heal_here(values)
    assert "auto_map" not in json.loads((Path(values["out"]) / "config.json").read_text())
    there = {path.name for path in Path(values["out"]).iterdir()}
    assert there - {path.name for path in student.iterdir()} == {"heal.json", "heal.jsonl", "chat_template.jinja"}
    left_out = ["id_rsa", "modeling_x.py", "notes.txt", "optimizer.pt", "trainer_state.json"]
    assert facts["left_out"] == left_out


@pytest.mark.parametrize("others", [{"batch_size": 4, "gradient_accumulation": 1}, {"gradient_checkpointing": True}])
def test_neither_accumulation_nor_checkpointing_changes_more_than_rounding(settings, whole, others):
    values = settings(**others)
    heal_here(values)
    torch.testing.assert_close(losses_of(values), losses_of(whole), rtol=1e-5, atol=0)
    for name, each in tensors(values["out"]).items():
        torch.testing.assert_close(each, tensors(whole["out"])[name], rtol=1e-3, atol=1e-4)


def test_another_seed_is_another_run(settings, whole):
    """Compare runs of two seeds; a resumed run shows that an equal one is an equal run."""
    values = settings(seed=1)
    heal_here(values)
    assert losses_of(values) != losses_of(whole)


def test_a_resumed_run_goes_on_exactly(settings, whole, capsys):
    parts = settings(name="parts")
    message = r"signal 15 after step 3; saved in .*run the same command"
    with stopped_after(3), pytest.raises(Interrupted, match=message) as stopped:
        heal_here(parts)
    assert stopped.value.code == 143
    assert log_of(parts, "stop", finished=False)[0]["step"] == 3
    assert not Path(parts["out"]).exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    path = Path(f"{parts['out']}.run/checkpoints/step-00000003/state.json")
    state = json.loads(path.read_text())
    state["position"] |= {"evaluations": [], "recent": [1.0], "spikes": 0}  # entries of earlier versions
    state["identity"] |= {
        "train_patterns": [],
        "balanced": True,
        "weight_decay": 0.0,
        "objective": {**state["identity"]["objective"], "jsd": 0.0},
    }
    path.write_text(json.dumps(state))
    facts = heal_here(parts)
    err = capsys.readouterr().err
    assert facts["steps"] == 4
    assert "step 1 (25%, about " in err
    assert losses_of(parts) == losses_of(whole)
    assert all(torch.equal(each, tensors(whole["out"])[name]) for name, each in tensors(parts["out"]).items())


def test_the_command_ends_with_one_line_and_a_code(settings, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.yaml").write_text("studnet: x\n")
    assert main(["--config", str(tmp_path / "x.yaml")]) == 1
    assert capsys.readouterr().err.endswith("unknown setting 'studnet'; did you mean student?\n")
    monkeypatch.setattr(loop.Loop, "_report", lambda *arguments: os.kill(os.getpid(), signal.SIGINT))
    assert main(["--config", str(settings_file(settings()))]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith("surgery: stopped by signal 2 after step 1")


def test_a_finished_run_goes_on_with_a_larger_budget_only_as_it_was(settings, capsys):
    heal_here(settings(max_steps=2))
    with pytest.raises(SurgeryError, match=r"was made with learning_rate 0\.001, not 0.1"):
        heal_here(settings(max_steps=4, overwrite=True, learning_rate=0.1))
    assert heal_here(settings(max_steps=4, overwrite=True))["steps"] == 4
    notes = " ".join(capsys.readouterr().err.split())
    assert "the budget is max_steps 4, not max_steps 2: " in notes


def test_a_loss_that_is_not_finite_stops_before_the_step(settings, monkeypatch):
    real, calls = Distillation.forward, []

    def forward(self, batch, positions, cached=None, measure=False):
        total, parts = real(self, batch, positions, cached, measure)
        calls.append(measure)
        return total * float("nan") if calls.count(False) > 8 else total, parts

    monkeypatch.setattr(Distillation, "forward", forward)
    values = settings(held_out=0, max_steps=20, save_every=4)
    with pytest.raises(SurgeryError, match=r"step 5: the loss is nan.*last good checkpoint is .*step-00000004"):
        heal_here(values)
    assert not Path(values["out"]).exists()


def test_the_first_limit_ends_it(settings):
    assert heal_here(settings(max_tokens=300))["steps"] == 3  # 128 tokens per step
    facts = heal_here(settings(name="time", max_steps=None, max_seconds=0.3, eval_every=None, held_out=0))
    assert facts["ended"] == "max_seconds reached"


def test_frozen_entries_survive_a_healing(settings, tmp_path, student):
    shapes = {name: tensor.shape for name, tensor in tensors(student).items()}
    rules = {name: {"rows": [0, *[1] * (shapes[name][0] - 2), 0]} for name in shapes if "k_proj.weight" in name}
    rules["model.layers.0.self_attn.v_proj.weight"] = {"rows": 0}
    (tmp_path / "rules.json").write_text(json.dumps(rules))
    values = settings(entry_factors=str(tmp_path / "rules.json"))
    assert heal_here(values)["parameters"]["with_factors"] == 3
    before, after = tensors(student), tensors(values["out"])
    for name, each in after.items():
        equal = (each == before[name]).flatten(1).all(1) if each.ndim > 1 else each == before[name]
        if "self_attn" not in name or "0.self_attn.v_proj" in name:
            assert equal.all(), name
        elif "k_proj" in name:
            assert equal.nonzero().flatten().tolist() == [0, len(each) - 1], name
        else:
            assert not equal.any(), name


def test_adapters_are_written_apart_and_merged(settings, student):
    from peft import PeftModel

    values = settings(train="lora", lora_rank=2, learning_rate=1e-2)
    heal_here(values)
    out = Path(values["out"])
    merged = AutoModelForCausalLM.from_pretrained(out)
    apart = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(student), out / "adapter")
    tokens = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, apart(tokens).logits, rtol=1e-4, atol=1e-4)
    changed = {name for name, each in tensors(out).items() if not torch.equal(each, tensors(student)[name])}
    assert changed == {name for name in tensors(student) if "self_attn" in name and name.endswith("_proj.weight")}


@pytest.mark.parametrize(("make", "masked"), [(lossless_model, True), (lossless_low_rank, None)])
def test_students_of_the_custom_class(tmp_path, make, masked):
    with torch.no_grad():
        source = tiny_source("llama", vocab_size=4096)
        model = make(source)
        for name, each in model.named_parameters():
            if "kv_down" in name:
                each.add_(torch.randn_like(each), alpha=0.1)
    for name, each in (("source", source), ("student", model)):
        each.save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name)
    values = heal_settings(tmp_path, tmp_path / "student", tmp_path / "source", max_steps=8)
    facts = heal_here({**values, "objective": {"kl": 1.0, "hidden": 0.1}, "gradient_checkpointing": True})
    assert facts["held_out"]["last"]["kl"] < facts["held_out"]["first"]["kl"]
    if masked is not None:
        assert facts["document_masks"] is masked
    healed = AutoModelForCausalLM.from_pretrained(values["out"])
    assert type(healed).__name__ == "SurgeryForCausalLM"
    before, after = tensors(tmp_path / "student"), tensors(values["out"])
    changed = {name.split("self_attn.")[-1] for name in after if not torch.equal(after[name], before[name])}
    assert "kv_down.weight" in changed
    assert "model.norm.weight" not in changed


def test_weights_that_train_are_fp32_and_the_result_is_the_students_dtype(tmp_path, teacher):
    student = make_checkpoint(tmp_path / "half", "llama", torch.bfloat16, seed=1)
    values = heal_settings(tmp_path, student, teacher, dtype="bf16", learning_rate=1e-2)
    facts = heal_here(values)
    assert facts["precision"] == "bf16"
    assert {each.dtype for each in tensors(values["out"]).values()} == {torch.bfloat16}
    assert json.loads((Path(values["out"]) / "config.json").read_text())["dtype"] == "bfloat16"
    result_tensors = load_file(next(Path(f"{values['out']}.run").glob("checkpoints/*6")) / "trained.safetensors")
    assert {each.dtype for each in result_tensors.values()} == {torch.float32}


def test_logits_on_disk_take_the_teachers_place(settings, whole, tmp_path):
    cache = str(tmp_path / "cache")
    files, read = settings(name="written"), settings(name="read")
    heal_here({**files, "teacher_logits": cache, "teacher_top_k": 4096})
    torch.testing.assert_close(losses_of(files), losses_of(whole), rtol=5e-3, atol=1e-4)
    heal_here({**read, "teacher_logits": cache, "teacher": None})
    assert losses_of(read) == losses_of(files)
    with pytest.raises(SurgeryError, match=r"has logits of 16 sequences, the budget needs 20"):
        heal_here({**read, "max_steps": 5, "teacher_logits": cache, "teacher": None, "overwrite": True})


def test_memory_errors_name_settings():
    with pytest.raises(SurgeryError, match="at step 3; lower batch_size"), memory_errors(lambda: "step 3"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(SurgeryError), memory_errors(lambda: ""):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    with pytest.raises(RuntimeError, match="shapes"), memory_errors(lambda: ""):
        raise RuntimeError("shapes differ")


def test_refusals_before_anything_is_done(settings, tmp_path, student, teacher):
    values = settings()
    with pytest.raises(SurgeryError, match="replace its own source"):
        heal_here({**values, "out": str(student)})
    Path(values["out"]).mkdir()
    (Path(values["out"]) / "config.json").write_text("{}")
    with pytest.raises(SurgeryError, match="exists"):
        heal_here(values)
    with pytest.raises(SurgeryError, match="fp16 needs an accelerator"):
        heal_here({**values, "dtype": "fp16"})
    if not torch.cuda.is_available():
        with pytest.raises(SurgeryError) as error:
            heal_here({**values, "device": "cuda"})
        assert error.value.setting == "device"
    with pytest.raises(SurgeryError, match="shard_teacher needs FSDP2"):
        heal_here(settings(name="sharded", shard_teacher=True))
    assert not (tmp_path / "sharded").exists()


def test_the_layer_wise_stage_trains_each_attention_on_its_teachers_inputs(settings, tmp_path, student):
    facts = heal_here(settings(objective={"layerwise": 1.0}, learning_rate=1e-2))
    assert facts["loss"]["last"] < facts["loss"]["first"]
    before, after = load_file(student / "model.safetensors"), load_file(tmp_path / "healed" / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before if "self_attn" in name)
    assert all(torch.equal(before[name], after[name]) for name in before if "self_attn" not in name)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({"objective": {"layerwise": 1.0, "kl": 1.0}}, "excludes other losses"),
        ({"objective": {"layerwise": 1.0}, "train": "all"}, 'does not support train "all"'),
    ],
)
def test_the_layer_wise_stage_stands_alone(settings, inputs, reason):
    with pytest.raises(SurgeryError, match=reason):
        HealSettings(**settings(**inputs)).weights()


TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}


@pytest.mark.parametrize("rate", [1.0, 1e-5])
def test_the_state_of_least_divergence_is_written(rate, conversions, checkpoints, tmp_path):
    """A model that reads values in bits is never written worse than it was."""
    student = conversions("llama", ConvertSettings(**TEXT, bits="auto", kv_ratio=0.1, batch_size=4)).path
    values = heal_settings(tmp_path, student, checkpoints("llama"), max_steps=3, eval_every=1, learning_rate=rate)
    held_out = heal_here(values)["held_out"]
    measured = {line["step"]: line["kl"] for line in log_of(values, "held_out")}
    assert set(measured) == {0, 1, 2, 3} and held_out["written"] == "best"
    assert held_out["best_step"] == min(measured, key=measured.get) and held_out["best_kl"] == min(measured.values())
    before, after = (load_file(folder / "model.safetensors") for folder in (student, tmp_path / "healed"))
    same = all(torch.equal(before[name], after[name]) for name in before)
    assert same == (held_out["best_step"] == 0) and (same or rate < 1)
