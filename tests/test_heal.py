"""`surgery heal`, end to end on tiny models: trained, of the same form, verified, and on record."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import run_main
from conversions import convert_checkpoint
from healing import heal_here, heal_settings, trained_here
from own_models import KINDS, tiny_source
from processes import Fork
from safetensors.torch import load_file
from tiny_models import DEMO, HELD_OUT, add_tokenizer, needs_constant_norm
from transformers import AutoModelForCausalLM

from surgery.architectures.lr_multipliers import lr_multipliers
from surgery.architectures.neutral_norm import recognized_norm
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.named_models import demo_model
from surgery.common.errors import SurgeryError
from surgery.common.human import with_perplexity
from surgery.common.progress import Progress
from surgery.evaluation.settings import EvalSettings
from surgery.healing import heal as healing
from surgery.healing.heal import HealRequest, heal_checkpoint
from surgery.healing.launchers import (
    count_processes,
    find_launcher,
    is_sharded,
    keeps_freed_memory,
    outside,
)
from surgery.inspection.checks import verify_checkpoint
from surgery.reporting.healing_table import gap_closed, quality_table, stage_facts
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.workflow.recipe import run_recipe

pytestmark = pytest.mark.usefixtures("short_decoding")

FEW = {"length": 32, "batch_size": 2, "gradient_accumulation": 1, "held_out": 2, "max_steps": 3, "max_tokens": None}
FEW |= {"data": (str(HELD_OUT),), "learning_rate": 1e-2, "device": "cpu", "recall": 0.0}
GQA = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none")
MLA = {"kv_lora_rank": 12, "rope_dim": 4, "calibration": "none", "carrier": "stock"}
OLD = Path(__file__).with_name("old_checkpoints")
BY_BUDGET = {"batch_size": None, "gradient_accumulation": None, "max_tokens": 96}
MEASURE = {"windows": 2, "length": 32, "recall_prompts": 1, "data": (str(HELD_OUT),)}


@pytest.fixture(autouse=True)
def quick_start(monkeypatch):
    """Trainings run in this process, but in the test that starts one."""
    monkeypatch.setattr(healing, "run_interruptible", trained_here)


def forked_training(command: list[str], environment: dict[str, str]) -> int:
    """Run a training in a process that has imported torch already, in place of `run_interruptible`."""
    assert command[:2] == [sys.executable, "-m"]
    return Fork(*command[3:], module=command[2], environment=environment).wait()


@pytest.fixture
def pair_of(checkpoints, conversions, tmp_path):
    """A source and what was converted from it."""

    def make(kind):
        if kind == "constant":
            source = needs_constant_norm(tmp_path / "constant")
            return source, convert_checkpoint(source, tmp_path / "constant-mla", ConvertSettings(**MLA)).path
        settings = GQA if kind == "gqa" else ConvertSettings(**MLA)
        return checkpoints("llama"), conversions("llama", settings).path

    return make


def request(source, student, out, **settings):
    return HealRequest(str(student), out, overrides={**FEW, "teacher": str(source), **settings}, measure=None)


@pytest.mark.parametrize("kind", [pytest.param("tiny", marks=pytest.mark.slow), "constant"])
def test_stock_mla_stays_stock(pair_of, tmp_path, kind, monkeypatch):
    monkeypatch.setattr("surgery.training.heal.balance_latents", lambda *_: 0)  # so that steps can be compared
    source, student = pair_of(kind)
    healed = heal_checkpoint(request(source, student, tmp_path / "out"))
    before, after = load_file(student / "model.safetensors"), load_file(healed.path / "model.safetensors")
    assert type(AutoModelForCausalLM.from_pretrained(healed.path)).__name__ == "DeepseekV3ForCausalLM"
    width = json.loads((healed.path / "config.json").read_text())["kv_lora_rank"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        assert torch.equal(after[prefix + "kv_a_layernorm.weight"], before[prefix + "kv_a_layernorm.weight"])
        bias = after.get(prefix + "kv_a_proj_with_mqa.bias")
        norm = recognized_norm(after[prefix + "kv_a_layernorm.weight"], None if bias is None else bias[:width])
        assert norm.kind == kind
        weight, old = (tensors[prefix + "kv_a_proj_with_mqa.weight"][:width] for tensors in (after, before))
        assert not torch.equal(weight, old), "the latent did not train"
        # As far as a step moves a weight of usual size, in proportion to theirs.
        rules = lr_multipliers(CheckpointReader.open(student))[prefix + "kv_a_proj_with_mqa.weight"]
        factor = 1.0 if norm.extra else rules["rows"][0]
        assert (weight - old).abs().max() <= 3 * FEW["learning_rate"] * factor * 1.01
        if norm.extra:
            assert torch.equal(weight[-1], old[-1])
            up, values = (tensors[prefix + "kv_b_proj.weight"] for tensors in (after, before))
            assert torch.equal(up[:, -1], values[:, -1]) and not torch.equal(up, values)
            # Queries have biases here, by a latent that hands inputs on.
            for name in ("q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight"):
                assert torch.equal(after[prefix + name], before[prefix + name])
            assert not torch.equal(after[prefix + "q_b_proj.weight"], before[prefix + "q_b_proj.weight"])
    assert before.keys() == after.keys()


def test_the_report_and_the_card_say_what_happened(pair_of, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.healing.heal.run_interruptible", forked_training)
    source, student = pair_of("gqa")
    settings = request(source, student, tmp_path / "out")
    healed = heal_checkpoint(HealRequest(**{**vars(settings), "measure": MEASURE}))
    report = json.loads((healed.path / "surgery_report.json").read_text())
    healing = report["healing"]
    assert [entry["name"] for entry in healing["quality"]] == ["source", "converted", "healed"]
    assert healing["steps"] == 3 and healing["tokens"] == 3 * 2 * 32
    losses = {entry["name"]: entry["loss"] for entry in healing["quality"]}
    assert losses["healed"] != losses["converted"]
    assert healing["gap_closed"] == gap_closed(healing["quality"])
    assert report["target"]["to"] == "mqa" and "teacher" not in healing["settings"]
    card = (healed.path / "README.md").read_text()
    assert (
        "healed by distillation: 192 tokens" in card
        and f"| converted | {with_perplexity(losses['converted'])} |" in card
    )
    assert not (tmp_path / "out.healing").exists()
    assert (healed.path / "heal.jsonl").read_text().count('"step"') >= 3


def test_a_training_that_is_launched_directly_takes_names_and_passes_verify(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    monkeypatch.setattr("surgery.checkpoint.named_models.demo_model", lambda: source)
    values = heal_settings(tmp_path, student, "builtin", max_steps=1, held_out=0, eval_every=None)
    assert heal_here(values)["teacher_sha256"] == CheckpointReader.open(source).fingerprint()
    outcomes = {check.name: check.outcome for check in verify_checkpoint(values["out"], device="cpu").checks}
    assert outcomes["files"] == "passed" and outcomes["logits"] == "not checked" and "failed" not in outcomes.values()


@pytest.mark.parametrize("kind", ["low_rank", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_the_custom_class_without_a_report(tmp_path, kind):
    with torch.no_grad():
        source = tiny_source("llama", vocab_size=4096)
        student = KINDS[kind](source)
    for model, name in ((source, "source"), (student, "student")):
        model.save_pretrained(tmp_path / name)
        add_tokenizer(tmp_path / name)
    healed = heal_checkpoint(request(tmp_path / "source", tmp_path / "student", tmp_path / "out"))
    assert healed.healing["verification"]["kv_bytes_per_token"] > 0
    assert (healed.path / "surgery_healing.json").exists()
    config = json.loads((healed.path / "config.json").read_text())
    assert (
        config["attention_layers"] == json.loads((tmp_path / "student" / "config.json").read_text())["attention_layers"]
    )


def test_a_failed_training_leaves_no_checkpoint_and_the_next_one_goes_on(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    for code, advice in ((7, "the same command"), (1, "saved steps stay in ")):
        monkeypatch.setattr(healing, "run_interruptible", lambda *_, code=code: code)
        with pytest.raises(SurgeryError, match=f"exit code {code}, .*{advice}"):
            heal_checkpoint(request(source, student, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(healing, "run_interruptible", trained_here)
    assert heal_checkpoint(request(source, student, tmp_path / "out")).path.is_dir()


def test_a_finished_training_is_not_repeated_unless_it_is_restarted(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    settings, trained = vars(request(source, student, tmp_path / "out", **BY_BUDGET)), []

    def broken(*_):
        raise SurgeryError("verification failed")

    monkeypatch.setattr(healing, "run_interruptible", lambda *asked: trained.append(1) or trained_here(*asked))
    for restart in (False, True):
        with pytest.MonkeyPatch.context() as refuse, pytest.raises(SurgeryError, match="verification failed"):
            refuse.setattr(healing, "verify_healed", broken)
            heal_checkpoint(HealRequest(**settings | {"restart": restart}))
        assert not (tmp_path / "out").exists() and len(trained) == 1 + restart
    monkeypatch.setattr(healing, "run_interruptible", lambda *_: pytest.fail("trained again"))
    assert heal_checkpoint(HealRequest(**settings)).path.is_dir()


def test_a_recipe_heals_once(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    step = {"name": "healed", "student": str(student), "teacher": str(source), **FEW, **BY_BUDGET}
    step |= {"data": [str(HELD_OUT)]}
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"steps": [{"heal": step}]}))
    monkeypatch.setattr(healing, "EvalSettings", lambda **given: EvalSettings(**given, **MEASURE))
    run_recipe(path, tmp_path / "work", Progress(silent=True))
    record = tmp_path / "work" / "healed" / "heal.json"
    facts = json.loads(record.read_text())
    assert facts["steps"] == 3
    facts["settings"]["quantization_aware"] = True  # of an earlier version
    record.write_text(json.dumps(facts))
    monkeypatch.setattr(healing, "run_interruptible", lambda *_: pytest.fail("trained again"))
    assert run_recipe(path, tmp_path / "work", Progress(silent=True)).checkpoints == {
        "healed": tmp_path / "work" / "healed"
    }
    path.write_text(json.dumps({"steps": [{"heal": {**step, "max_steps": 4}}]}))
    with pytest.raises(SurgeryError, match="other settings"):
        run_recipe(path, tmp_path / "work", Progress(silent=True))


def test_refusals_come_before_training(pair_of, tmp_path, monkeypatch, capsys):
    source, student = pair_of("gqa")
    monkeypatch.setattr(healing, "run_interruptible", lambda *_: pytest.fail("trained"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(SurgeryError, match="--overwrite"):
        heal_checkpoint(request(source, student, tmp_path / "out"))
    with pytest.raises(SurgeryError, match="replace its own source"):
        heal_checkpoint(request(source, student, student))
    with pytest.raises(SurgeryError, match="learning_rate"):
        heal_checkpoint(request(source, student, tmp_path / "other", learning_rate=-1.0))
    for name in ("quantized", "lowrank-mixed"):
        with pytest.raises(SurgeryError, match=r"groups of tokens.*convert the source again with --bits auto"):
            heal_checkpoint(request(source, OLD / name, tmp_path / "other"))


@pytest.mark.slow
def test_stages_stand_in_one_table(pair_of, tmp_path):
    source, student = pair_of("gqa")
    for name, values, before in (
        ("layers", {"objective": {"layerwise": 1.0}, "learning_rate": 1e-3}, student),
        ("out", {"max_steps": 2}, tmp_path / "layers"),
    ):
        settings = request(source, before, tmp_path / name, **values)
        healed = heal_checkpoint(HealRequest(**{**vars(settings), "measure": MEASURE}))
    report = json.loads((healed.path / "surgery_report.json").read_text())["healing"]
    first = json.loads((tmp_path / "layers" / "surgery_report.json").read_text())["healing"]
    assert report["earlier"] == [first] and first["earlier"] == []
    assert [row["name"] for row in report["table"]] == ["source", "converted", "healed, stage 1", "healed"]
    losses = [row["loss"] for row in report["table"]]
    assert losses[:3] == [row["loss"] for row in first["table"]] and losses[2] == report["quality"][1]["loss"]
    assert report["gap_closed"] == gap_closed(report["table"])
    card = (healed.path / "README.md").read_text()
    assert (
        "healed by distillation: 320 tokens" in card and f"| healed, stage 1 | {with_perplexity(losses[2])} |" in card
    )
    assert "| 1 | attention | layerwise 1 | 0.001 | 2 × 32 | " in card
    assert "| 2 | attention | kl 1 | 0.01 | 2 × 32 | " in card and "| 2 | 128 | " in card
    # A stage that was measured on other data, or not at all, is not in the table; what trained is told all the same.
    alone = {**report, "earlier": [{**first, "quality": []}]}
    assert [row["name"] for row in quality_table(alone)] == ["source", "after stage 1", "healed"]
    assert gap_closed(quality_table(alone)) is None and len(stage_facts(alone)) == 2


def test_launchers_have_names(tmp_path, monkeypatch):
    fsdp2 = find_launcher("fsdp2")
    assert (fsdp2.name, is_sharded(fsdp2), is_sharded(find_launcher("cpu-2"))) == ("fsdp2.yaml", True, False)
    assert [count_processes(*values) for values in ((None, None), (3, None), (None, fsdp2), (2, fsdp2))] == [1, 3, 8, 2]
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 4\n")
    assert count_processes(None, find_launcher(own)) == 4 and find_launcher(str(own)) == own
    with pytest.raises(SurgeryError, match=r"use a file or one of cpu-1, .*did you mean fsdp2\?"):
        find_launcher("fsdp3")
    own.write_text("distributed_type: DEEPSPEED\n")
    with pytest.raises(SurgeryError, match="DeepSpeed was removed: use --launcher fsdp2"):
        find_launcher(own)
    inside = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1", "ACCELERATE_USE_FSDP": "true", "PATH": "x"}
    assert outside(inside) == {"PATH": "x"}
    assert outside({"ACCELERATE_USE_CPU": "1"}) == {"ACCELERATE_USE_CPU": "1"}


def test_trainings_on_a_cpu_keep_freed_memory():
    # Resident memory after 64 MB were freed: glibc takes what it is told, or this would say nothing of it.
    probe = "import psutil; x = bytearray(1 << 26); del x; print(psutil.Process().memory_info().rss >> 20)"

    def resident(environment: dict[str, str]) -> int:
        process = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, check=True)
        return int(process.stdout)

    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("no glibc")
    assert resident(keeps_freed_memory(plain)) > 64 > resident(plain)
    assert keeps_freed_memory({"GLIBC_TUNABLES": "x"}) == {"GLIBC_TUNABLES": "x"}


def test_a_recipe_says_how_a_training_is_launched(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    commands = []

    def run(command, environment):
        commands.append(command)
        return 7

    monkeypatch.setattr(healing, "run_interruptible", run)
    path = tmp_path / "recipe.yaml"
    for values in ({"processes": 1}, {"processes": 2}, {"launcher": "fsdp2"}, {"launcher": "cpu-2", "processes": 3}):
        step = {"name": "healed", "student": str(student), "teacher": str(source), **FEW, "data": [str(HELD_OUT)]}
        path.write_text(json.dumps({"steps": [{"heal": {**step, **values}}]}))
        with pytest.raises(SurgeryError, match="exit code 7"):
            run_recipe(path, tmp_path / "work", Progress(silent=True))
    training = ["-m", "surgery.training.heal", "--config"]
    alone, many, *by_file = commands
    assert alone[1:4] == training and all(command[-4:-1] == training for command in (many, *by_file))
    assert "--multi_gpu" in many and many[5] == "2"
    assert [Path(command[4]).name for command in by_file] == ["fsdp2.yaml", "cpu-2.yaml"]
    assert "--num_processes" not in by_file[0] and by_file[1][5:7] == ["--num_processes", "3"]


HEAL_STEP = {"name": "h", "student": "s", "teacher": "t"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launcher": "fsdp3"}, r"step h: unknown launcher fsdp3: .*did you mean fsdp2\?"),
        ({"processes": 0}, "step h: processes must be a whole number"),
        ({"processes": "two"}, "step h: processes must be a whole number"),
        ({"measure": {"window": 2}}, "did you mean windows"),
        ({"measure": "some"}, "measure must be true, false or settings"),
        ({"measure": {"tasks": ["needle"]}}, "measure does not support tasks"),
    ],
)
def test_mistakes_of_heal_steps_are_told_before_anything_runs(tmp_path, settings, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps({"steps": [{"heal": {**HEAL_STEP, **settings}}]}))
    with pytest.raises(SurgeryError, match=message):
        run_recipe(path, tmp_path / "work", Progress(silent=True))
    assert not (tmp_path / "work").exists()


def test_wandb_is_refused_before_the_training_is_launched(pair_of, tmp_path, monkeypatch):
    source, student = pair_of("gqa")
    monkeypatch.setattr(healing, "run_interruptible", lambda *_: pytest.fail("trained"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SurgeryError, match="pip install wandb"):
        heal_checkpoint(request(source, student, tmp_path / "out", wandb="p"))
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_what_trackers_write_stays(pair_of, tmp_path):
    pytest.importorskip("wandb")
    source, student = pair_of("gqa")
    settings = {"wandb": "p", "wandb_mode": "offline"}
    healed = heal_checkpoint(request(source, student, tmp_path / "out", **settings))
    assert len(list((tmp_path / "out.tracking" / "wandb").glob("offline-run-*"))) == 1
    assert healed.healing["wandb"]["run_id"] and "tracker_folder" not in healed.healing["settings"]
    assert not (tmp_path / "out.healing").exists()


def test_lr_multipliers_are_for_stock_mla_alone(pair_of):
    assert lr_multipliers(CheckpointReader.open(pair_of("gqa")[1])) == {}


def test_the_share_of_the_gap():
    def quality(source, converted, healed):
        names = {"source": source, "converted": converted, "healed": healed}
        return [{"name": name, "loss": loss} for name, loss in names.items()]

    assert gap_closed(quality(2.0, 3.0, 2.25)) == 0.75
    assert gap_closed(quality(2.0, 2.001, 1.9)) is None  # a gap in the noise
    assert gap_closed([]) is None


def test_builtin_is_the_model_that_ships(tmp_path, monkeypatch, capsys):
    plans, config = [], tmp_path / "heal.yaml"
    config.write_text("teacher: builtin\n")
    builtin = str(demo_model())
    for teacher in (("--teacher", "builtin"), ("--teacher", builtin), ("--config", str(config))):
        request = ("heal", str(DEMO), *teacher, "--max-tokens", "9999", "--out", str(tmp_path / "out"))
        code, out, _ = run_main(monkeypatch, capsys, *request, "--device", "cpu", "--dry-run", "--json")
        assert code == 0
        plan = json.loads(out)
        plans.append((plan["settings"], plan["estimate"]))
    assert plans[0] == plans[1] == plans[2]
