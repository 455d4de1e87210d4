"""Multimodal models: heads of their language models are merged, all else stays, and pictures still work."""

import json
import shutil
from functools import cache

import pytest
import torch
import transformers
from conversions import convert_checkpoint
from healing import trained_here
from picture_models import IMAGE, as_early_qwen, check_caches, loaded, prompt
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT, SHORT_TEXT

from surgery.common.errors import SurgeryError
from surgery.engines.verdict import LOADS, NOT_TRIED
from surgery.evaluation.models import Checkpoint
from surgery.families.latent_family import DOWN, NORM, UP
from surgery.families.multimodal import HOLD_CUSTOM
from surgery.healing.dry_run import plan_healing
from surgery.healing.heal import HealRequest, heal_checkpoint
from surgery.inspection.checks import PASSED, verify_checkpoint
from surgery.inspection.inspect import inspect_checkpoint
from surgery.structures.dry_run import plan_conversion
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import TARGETS

HALF = KVHeadsSettings(**SHORT_TEXT, batch_size=2)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def merged(picture_models, tmp_path_factory):
    """Gives a model whose heads were merged, converted once; to be read."""

    @cache
    def get(name):
        return convert_checkpoint(picture_models(name), tmp_path_factory.mktemp("merged") / "out", HALF)

    return get


MERGED = ("llava", "llava_next", "mistral3 of ministral3", "qwen2_5_vl")
BROKEN = pytest.mark.xfail(
    transformers.__version__ == "5.24.0",
    raises=AttributeError,
    strict=True,
    reason="Llama4ForConditionalGeneration of 5.24.0 looks for image_outputs that its language model does not return",
)
MLA_INSIDE = "mistral3 of mistral4"


@pytest.mark.parametrize("name", [*MERGED, pytest.param("llama4", marks=[pytest.mark.slow, BROKEN])])
@torch.no_grad()
def test_heads_are_merged_and_pictures_still_work(picture_models, merged, tmp_path, name):
    source = picture_models(name)
    before = weights(source)
    forecast, result = plan_conversion(source, tmp_path / "forecast", HALF), merged(name)
    assert result.report.target["model_type"] == forecast.target["model_type"] == name.split()[0]
    assert result.report.target["engines"] == {
        engine: {**entry, "command": entry["command"] and entry["command"].replace("CKPT", "out")}
        for engine, entry in forecast.target["engines"].items()
    }
    assert result.report.target["engines"]["transformers"]["status"] == (NOT_TRIED if name == "llama4" else LOADS)
    assert forecast.kv["bytes_per_token"] == result.report.kv["measured_bytes_per_token"]
    assert result.report.kv["ratio"] == 0.5

    after = weights(result.path)
    assert list(after) == list(before)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert len(changed) >= 8 and all(key.split(".")[-2] in PROJECTIONS and "layers." in key for key in changed)
    assert not any("vis" in key for key in changed)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, result.path)]
    assert configs[1]["text_config"].pop("num_key_value_heads") == 1
    del configs[0]["text_config"]["num_key_value_heads"]
    assert configs[0] == configs[1]
    assert "AutoModelForImageTextToText" in (result.path / "README.md").read_text(encoding="utf-8")
    assert {check.outcome for check in verify_checkpoint(result.path, device="cpu").checks} == {PASSED}
    rows = {row["to"]: row for row in inspect_checkpoint(result.path).targets}
    assert "one KV head already" in rows["gqa"]["reasons"][0]
    assert rows["lowrank"]["class"] == ("surgery_pictures" if name.split()[0] in HOLD_CUSTOM else None)

    models = loaded(source), loaded(result.path)
    results = [model.generate(**prompt(name), max_new_tokens=4, do_sample=False) for model in models]
    assert results[0].shape == results[1].shape
    check_caches(models[1], prompt(name))


@torch.no_grad()
def test_latents_become_fewer_and_pictures_still_work(picture_models, tmp_path):
    source, request = picture_models(MLA_INSIDE), ConvertSettings(**SHORT_TEXT, kv_lora_rank=12)
    forecast, result = (
        plan_conversion(source, tmp_path / "forecast", request),
        convert_checkpoint(source, None, request),
    )
    report, stages = result.report, {row["stage"]: row for row in result.report.ladder}
    assert report.target["model_type"] == forecast.target["model_type"] == "mistral3"
    assert report.kv["measured_bytes_per_token"] == forecast.kv["bytes_per_token"] == 3 * (12 + 8) * 4
    assert stages["rotated"]["logit_difference"] < 2e-5
    assert report.verification["logit_difference_to_simulation"] < 1e-5

    before, after = weights(source), weights(result.path)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert list(after) == list(before) and {key.split(".")[-2] for key in changed} == {DOWN, NORM, UP}
    whole = [json.loads((folder / "config.json").read_text()) for folder in (source, result.path)]
    assert [config["text_config"].pop("kv_lora_rank") for config in whole] == [16, 12] and whole[0] == whole[1]
    assert {check.outcome for check in verify_checkpoint(result.path, device="cpu").checks} == {PASSED}
    assert inspect_checkpoint(source).kv["bytes_per_token"] == 3 * (16 + 8) * 4
    assert inspect_checkpoint(result.path).kv["bytes_per_token"] == 3 * (12 + 8) * 4

    check_caches(loaded(result.path), prompt(MLA_INSIDE))

    loaded(source).model.language_model.save_pretrained(tmp_path / "alone")
    with pytest.raises(SurgeryError, match="convert the complete mistral3 checkpoint"):
        convert_checkpoint(tmp_path / "alone", tmp_path / "out", request)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_heads_that_say_the_same_merge_exactly_next_to_pictures(picture_models, tmp_path, name):
    """The second KV head is the first, each pair turned and stretched, values mixed: positions of pictures included."""
    source = shutil.copytree(picture_models(name), tmp_path / "source")
    tensors = weights(source)
    for key, tensor in tensors.items():
        module = key.rpartition(".")[0].rpartition(".")[2]
        if "layers." not in key or "vis" in key or module not in ("k_proj", "v_proj"):
            continue
        head = tensor.view(2, 8, -1)
        mix = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
        if module == "k_proj":
            real, imaginary = torch.randn(2, 4, generator=torch.Generator().manual_seed(5)).unbind()
            mix = (
                torch.cat([torch.diag(real), torch.diag(imaginary)]),
                torch.cat([torch.diag(-imaginary), torch.diag(real)]),
            )
            mix = torch.cat(mix, dim=1)
        head[1] = mix @ head[0]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    if name == "qwen2_5_vl":
        as_early_qwen(source)
    result = convert_checkpoint(source, tmp_path / "out", KVHeadsSettings(**SHORT_TEXT, batch_size=2))
    inputs = prompt(name)
    before, after = (loaded(folder)(**inputs).logits for folder in (source, result.path))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_evaluation_runs_what_reads_the_text(picture_models, name):
    """Its loss is that of the whole model on the same tokens."""
    checkpoint = Checkpoint.open(str(picture_models(name)))
    ids = torch.randint(3, IMAGE, (2, 48), generator=torch.Generator().manual_seed(3))
    alone, whole = checkpoint.load(torch.device("cpu")), loaded(picture_models(name))
    torch.testing.assert_close(alone(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)
    assert alone.config.model_type == {"llava": "llama", "qwen2_5_vl": "surgery"}[name]


def test_healing_writes_the_language_model_in_its_place(picture_models, merged, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.healing.heal.run_interruptible", trained_here)
    name = "qwen2_5_vl"
    converted = merged(name).path
    settings = {"teacher": str(picture_models(name)), "data": [str(HELD_OUT)], "max_steps": 2, "length": 64}
    settings |= {"train": "lora", "warmup": 0, "held_out": 1}
    request = HealRequest(str(converted), tmp_path / "healed", overrides=settings, measure=None)
    assert plan_healing(request).estimate
    healed = heal_checkpoint(request).path
    before, after = weights(converted), weights(healed)
    assert list(after) == list(before)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert len(changed) >= 4 and all(key.split(".")[-2] in PROJECTIONS and "layers." in key for key in changed)
    assert not any("vis" in key for key in changed)
    config = "config.json"
    assert json.loads((healed / config).read_text()) == json.loads((converted / config).read_text())
    assert loaded(healed)(**prompt(name)).logits.isfinite().all()
    assert {check.outcome for check in verify_checkpoint(healed, device="cpu").checks} == {PASSED}


@pytest.mark.parametrize("to", ["mla", "lowrank", "crosslayer", "hybrid"])
def test_what_holds_a_language_model_alone_is_refused(picture_models, tmp_path, to):
    settings = TARGETS[to].settings({"streaming": 1.0} if to == "hybrid" else {})
    with pytest.raises(SurgeryError, match=r"llama4 is a vision-language model.*--to gqa"):
        convert_checkpoint(picture_models("llama4"), tmp_path / "out", settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [{"method": "key-norm"}, {"engine": "vllm"}], ids=str)
def test_what_would_be_of_another_class_is_refused(picture_models, tmp_path, settings):
    with pytest.raises(SurgeryError, match="keeps its class"):
        convert_checkpoint(picture_models("qwen2_5_vl"), tmp_path / "out", KVHeadsSettings(**SHORT_TEXT, **settings))
    assert list(tmp_path.iterdir()) == []
