"""The custom model class inside of multimodal models: all else stays, and pictures are read as before."""

import json
import shutil
from functools import cache

import pytest
import torch
from conversions import convert_checkpoint
from picture_models import GRIDS, as_early_qwen, check_caches, loaded, prompt
from processes import Fork
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT, SHORT_TEXT
from transformers import AutoProcessor

from surgery.common.errors import SurgeryError
from surgery.engines.verdict import LOADS_WITH
from surgery.healing.heal import HealRequest, heal_checkpoint
from surgery.inspection.checks import PASSED, verify_checkpoint
from surgery.model import SurgeryForConditionalGeneration
from surgery.structures.dry_run import plan_conversion
from surgery.structures.registry import SLICE, TARGETS

HALF = {"batch_size": 2, "kv_ratio": 0.5}
STRUCTURES = {
    "mla": {**SHORT_TEXT, **HALF},
    "lowrank": {**SHORT_TEXT, **HALF},
    "hybrid": {"calibration": "none", "streaming": 1.0, "sinks": 2, "recent": 6},
    "quantized": {**SHORT_TEXT, "batch_size": 2},
}
WINDOWED = ("gemma3", "qwen3_5", "qwen3_5_moe")
"""Models of which some layers keep a window or a state."""
SOURCES = ("llava", "llava_next", "mistral3", "mistral3 of ministral3", "gemma3", *GRIDS)
FIRST = {("qwen3_vl", to) for to in STRUCTURES}
FIRST |= {("gemma3", "mla"), ("llava", "mla")}
CASES = [
    pytest.param(name, to, marks=[] if (name, to) in FIRST else pytest.mark.slow)
    for name in SOURCES
    for to in STRUCTURES
    if name not in WINDOWED or to in ("mla", "lowrank")
]

STRANGER = """
import sys
sys.modules["surgery"] = None  # an editable install is on the path: make importing it an error
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

path, folder = sys.argv[1:]
given = load_file(folder + "/prompt.safetensors")
model = AutoModelForImageTextToText.from_pretrained(path, trust_remote_code=True).eval()
with torch.no_grad():
    logits = model(**given).logits
    made = model.generate(**given, max_new_tokens=4, do_sample=False)
save_file({"logits": logits, "made": made}, folder + "/made.safetensors")
"""


def convert(source, out, to, **settings):
    return convert_checkpoint(source, out, TARGETS[to].settings(settings or STRUCTURES[to]))


@pytest.fixture(scope="module")
def conversion_of(picture_models, tmp_path_factory):
    """Gives what a model was converted to, once; to be read."""

    @cache
    def get(name, to, **settings):
        return convert(picture_models(name), tmp_path_factory.mktemp("made") / "out", to, **settings)

    return get


@pytest.mark.parametrize(("name", "to"), CASES)
@torch.no_grad()
def test_a_structure_next_to_pictures(picture_models, conversion_of, tmp_path, name, to):
    source, inputs = picture_models(name), prompt(name)
    forecast = plan_conversion(source, tmp_path / "forecast", TARGETS[to].settings(STRUCTURES[to]))
    report, out = conversion_of(name, to).report, conversion_of(name, to).path
    kv, stages = report.kv, {row["stage"]: row for row in report.ladder}
    assert report.target["model_type"] == forecast.target["model_type"] == "surgery_pictures"
    engines = [entry["status"] for entry in report.target["engines"].values()]
    assert engines == [entry["status"] for entry in forecast.target["engines"].values()] and engines[0] == LOADS_WITH
    assert "AutoModelForImageTextToText" in report.target["engines"]["transformers"]["command"]
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
    if to == "mla":
        assert max(stages[stage]["logit_difference"] for stage in ("merged", "rotated")) < 2e-5
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "import surgery" in card and "AutoModelForImageTextToText" in card and "image-text-to-text" in card
    assert {check.outcome for check in verify_checkpoint(out, device="cpu").checks} == {PASSED}

    before, after = loaded(source), loaded(out)
    assert isinstance(after, SurgeryForConditionalGeneration) and isinstance(after, type(before))
    state = after.state_dict()
    for key, tensor in before.state_dict().items():
        assert "language_model.layers." in key or torch.equal(state[key], tensor)
    texts = [model.generate(**inputs, max_new_tokens=4, do_sample=False) for model in (before, after)]
    assert texts[0].shape == texts[1].shape
    check_caches(after, inputs, tolerance=1e-2 if to == "quantized" else 1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen3_vl")) for name in SOURCES]
)
@torch.no_grad()
def test_it_loads_without_the_package(conversion_of, tmp_path, name):
    inputs, out = prompt(name), conversion_of(name, "lowrank").path
    save_file(inputs, tmp_path / "prompt.safetensors")
    stranger = Fork(out, tmp_path, code=STRANGER, path=(), cwd=tmp_path)
    assert stranger.wait() == 0, stranger.stderr[-2000:]
    elsewhere, model = load_file(tmp_path / "made.safetensors"), loaded(out)
    torch.testing.assert_close(elsewhere["logits"], model(**inputs).logits, rtol=0, atol=1e-5)
    assert torch.equal(elsewhere["made"], model.generate(**inputs, max_new_tokens=4, do_sample=False))


WHOLE = {
    "lowrank": {"rank": 16},
    "window": {"rank": 16, "window": 5, "sinks": 2},
    "mla": {"kv_lora_rank": 16, "rope_dim": 32},
    "mha2mla": {"kv_lora_rank": 16, "rope_dim": 32, "method": "mha2mla"},
}


@pytest.mark.parametrize(
    ("name", "to"),
    [("qwen3_vl", to) for to in WHOLE]
    + [pytest.param(name, to, marks=pytest.mark.slow) for name in SOURCES[-3:] for to in ("lowrank", "mla")]
    + [
        ("gemma3", "lowrank"),
        ("qwen2_5_vl of many heads", "lowrank"),
        pytest.param("gemma3", "mla", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_latents_that_hold_all_change_nothing(picture_models, conversion_of, name, to):
    """Pictures too, whose tokens have three positions, or see each other."""
    target = "lowrank" if to == "window" else to.removeprefix("mha2")
    keep = {"keep_layers": "none"} if name == "gemma3" else {}
    settings = {"rank": 32} if "many heads" in name else WHOLE[to]
    out = conversion_of(name, target, **SHORT_TEXT, **settings, **keep).path
    before, after, inputs = loaded(picture_models(name)), loaded(out), prompt(name)
    whole = before(**inputs).logits
    torch.testing.assert_close(after(**inputs).logits, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(after.generate(**inputs, **beams), before.generate(**inputs, **beams))


@torch.no_grad()
def test_a_conversation_goes_on_from_its_cache(picture_models, conversion_of):
    """Text, then a picture, then text: the positions of all tokens are known at every turn."""
    name, per_token = "qwen3_vl", ("input_ids", "attention_mask", "mm_token_type_ids")
    out = conversion_of(name, "lowrank", **SHORT_TEXT, rank=16).path
    inputs, message = prompt(name), []
    text = {key: inputs[key][:, -8:] for key in per_token}
    for model in (loaded(picture_models(name)), loaded(out)):
        how = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
        turn = model.generate(**text, **how)
        for new in (inputs, text):
            earlier = turn.sequences
            so_far = {"input_ids": earlier, "attention_mask": torch.ones_like(earlier)}
            so_far["mm_token_type_ids"] = torch.zeros_like(earlier)
            ids = {key: torch.cat([so_far[key], new[key]], dim=1) for key in per_token}
            turn = model.generate(**{**new, **ids}, **how, past_key_values=turn.past_key_values)
        message.append(turn.sequences)
    assert torch.equal(*message)


@torch.no_grad()
def test_early_configs_say_the_language_model_at_the_top(picture_models, tmp_path):
    name = "qwen2_5_vl"
    source = shutil.copytree(picture_models(name), tmp_path / "source")
    as_early_qwen(source)
    for folder, out in ((source, "early"), (picture_models(name), "late")):
        convert(folder, tmp_path / out, "hybrid")
    early, late = (loaded(tmp_path / out)(**prompt(name)).logits for out in ("early", "late"))
    assert torch.equal(early, late)


def test_its_processor_is_the_source_s(picture_models, tmp_path):
    """transformers finds it by the model type, which is another one, where no file names it."""
    source = shutil.copytree(picture_models("llava"), tmp_path / "source")
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    (source / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "CLIPImageProcessor", **sizes})
    )
    convert(source, tmp_path / "out", "hybrid")
    results = [AutoProcessor.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    assert type(results[0]) is type(results[1]) and results[1].image_processor.size == results[0].image_processor.size


@pytest.mark.slow
def test_what_was_converted_is_converted_on(picture_models, tmp_path):
    """Sliced and streamed, in the same class."""
    convert(picture_models("qwen3_vl"), tmp_path / "low", "lowrank")
    results = [
        convert_checkpoint(tmp_path / "low", tmp_path / "sliced", SLICE.settings({**SHORT_TEXT, "kv_ratio": 0.25})),
        convert(tmp_path / "low", tmp_path / "streaming", "hybrid"),
    ]
    for result in results:
        config = json.loads((result.path / "config.json").read_text())
        assert config["model_type"] == "surgery_pictures" and config["base_model_type"] == "qwen3_vl"
        assert loaded(result.path)(**prompt("qwen3_vl")).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_healing_writes_it_in_its_place(picture_models, tmp_path, name):
    convert(picture_models(name), tmp_path / "converted", "lowrank")
    settings = {"teacher": str(picture_models(name)), "data": [str(HELD_OUT)], "max_steps": 2, "length": 64}
    settings |= {"warmup": 0, "held_out": 1}
    request = HealRequest(str(tmp_path / "converted"), tmp_path / "healed", overrides=settings, measure=None)
    healed = heal_checkpoint(request).path
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "converted", healed))
    assert {key: tensor.shape for key, tensor in after.items()} == {key: each.shape for key, each in before.items()}
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert any("kv_down" in key for key in changed) and not any("visual" in key for key in changed)
    assert loaded(healed)(**prompt(name)).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "to", "settings", "reason"),
    [
        ("qwen3_vl", "crosslayer", {"kv_ratio": 0.5}, "vision-language model, which this target does not support"),
        ("llava", "crosslayer", {"method": "cascade"}, "vision-language model, which this target does not support"),
        ("qwen3_vl", "gqa", {"kv_heads": 1}, "with a q/k-norm"),
        ("qwen3_vl", "mla", {"method": "transmla"}, "merges neighboring rotary pairs"),
        ("llava", "mla", {"carrier": "stock"}, "cannot hold this model: the source has a vision tower"),
        ("llava", "mla", {"engine": "llama.cpp"}, "cannot hold this model: the source has a vision tower"),
        ("gemma3", "quantized", {}, "sliding window"),
        ("qwen3_5", "quantized", {}, "sliding window or a"),
    ],
)
def test_what_it_cannot_hold_is_refused(picture_models, tmp_path, name, to, settings, reason):
    with pytest.raises(SurgeryError, match=reason):
        convert(picture_models(name), tmp_path / "out", to, **settings)
    assert list(tmp_path.iterdir()) == []
