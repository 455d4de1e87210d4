"""Models of pictures and text: heads of their language models are merged, all else stays, and pictures still work."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import DEMO, HELD_OUT, LATENT, LATENT_EXPERTS, LATENT_YARN, LLAMA4, LLAMA4_VISION, SHAPE, VISION
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DynamicCache,
    Llama4Config,
    Llama4VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    Ministral3Config,
    Mistral3Config,
    Mistral4Config,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
)

from surgery.common.errors import SurgeryError
from surgery.engines import LOADS
from surgery.evaluation.models import Checkpoint
from surgery.families.latent_family import DOWN, NORM, UP
from surgery.healing.heal import HealRequest, heal_checkpoint, plan_healing
from surgery.inspection.checks import PASSED, verify_checkpoint
from surgery.inspection.inspect import inspect_checkpoint
from surgery.structures import converter
from surgery.structures.dry_run import plan_conversion
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import TARGETS

IMAGE = 4000
"""The token in the place of what a picture gives."""
SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "llama_4_scaling_beta": 0.1}
SCALED |= {"original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
CONFIGS = {
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**SHAPE), vision_config=CLIPVisionConfig(**VISION), image_token_index=IMAGE
    ),
    "llava_next": lambda: LlavaNextConfig(
        text_config=MistralConfig(**SHAPE, sliding_window=None),
        vision_config=CLIPVisionConfig(**VISION),
        image_token_index=IMAGE,
        image_grid_pinpoints=[[16, 32], [32, 16]],
    ),
    "llama4": lambda: Llama4Config(
        text_config={**LLAMA4, "num_local_experts": 2, "use_qk_norm": False},
        vision_config=Llama4VisionConfig(**LLAMA4_VISION),
        image_token_index=IMAGE,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
        vision_config=PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "mistral3 of ministral3": lambda: Mistral3Config(
        text_config=Ministral3Config(**SHAPE, head_dim=16, rope_parameters=SCALED),
        vision_config=PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "mistral3 of mistral4": lambda: Mistral3Config(
        text_config=Mistral4Config(
            **{**LATENT, **LATENT_EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 1},
            rope_parameters={
                **LATENT_YARN,
                **SCALED,
                "factor": 4.0,
                "mscale": 0.7,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
        vision_config=PixtralVisionConfig(**VISION),
        image_token_index=IMAGE,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config={**SHAPE, "rope_parameters": MROPE, "tie_word_embeddings": True},
        vision_config={"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        | {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
        vision_start_token_id=IMAGE + 2,
        vision_end_token_id=IMAGE + 3,
        tie_word_embeddings=True,
    ),
}
SIZES = {"image_sizes": torch.tensor([[16, 16]])}
TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
HALF = KVHeadsSettings(**TEXT, fit_steps=1, fit_iterations=1, batch_size=2)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    """Gives the folder of a tiny model of pictures and text, made once."""
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model = AutoModelForImageTextToText.from_config(CONFIGS[name]())
            for key, parameter in model.named_parameters():
                if key.endswith("bias"):
                    torch.nn.init.normal_(parameter, 0, 0.2)
            # Names as checkpoints of the hub have them, and those of the class.
            model.save_pretrained(folder, save_original_format="mistral3" not in name)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / file, folder / file)
        return made[name]

    return get


def picture(name: str) -> tuple[dict, int]:
    """A random picture as the model takes it, and the tokens that stand for it."""
    random = torch.Generator().manual_seed(1)
    if name == "qwen2_5_vl":
        patches = torch.randn(24, 3 * 2 * 4 * 4, generator=random)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 6]])}, 6
    if name == "llava_next":  # a grid of two, and the picture as a whole
        return {"pixel_values": torch.randn(1, 3, 3, 16, 16, generator=random), **SIZES}, 16 + 4 * (4 + 1)
    sizes = {} if name in ("llava", "llama4") else SIZES
    return {"pixel_values": torch.randn(1, 3, 16, 16, generator=random), **sizes}, 16 if name == "llava" else 4


def prompt(name: str) -> dict:
    """Text with a picture in it."""
    given, count = picture(name)
    text = torch.randint(3, IMAGE, (20,), generator=torch.Generator().manual_seed(2))
    start = torch.tensor([IMAGE + 2] if name == "qwen2_5_vl" else [], dtype=torch.long)
    ids = torch.cat([text[:8], start, torch.full((count,), IMAGE), text[8:]])[None]
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | ({"mm_token_type_ids": (ids == IMAGE).int()} if name == "qwen2_5_vl" else {})


def loaded(folder):
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    return model.eval()


def weights(folder):
    return load_file(folder / "model.safetensors")


MLA_INSIDE = "mistral3 of mistral4"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "llama4")) for name in CONFIGS if name != MLA_INSIDE],
)
@torch.no_grad()
def test_heads_are_merged_and_pictures_still_work(towers, tmp_path, name):
    source = towers(name)
    before = weights(source)
    foreseen = plan_conversion(source, tmp_path / "foreseen", HALF)
    result = converter.convert(source, tmp_path / "out", HALF)
    assert result.report.target["model_type"] == foreseen.target["model_type"] == name.split()[0]
    assert result.report.target["engines"] == {
        engine: {**said, "command": said["command"] and said["command"].replace("CKPT", "out")}
        for engine, said in foreseen.target["engines"].items()
    }
    assert result.report.target["engines"]["transformers"]["status"] == LOADS
    assert foreseen.kv["bytes_per_token"] == result.report.kv["measured_bytes_per_token"]
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
    assert "one KV head already" in rows["gqa"]["reasons"][0] and "pictures" in rows["mla"]["reasons"][0]

    made = [
        loaded(folder).generate(**prompt(name), max_new_tokens=4, do_sample=False)
        for folder in (source, tmp_path / "out")
    ]
    assert made[0].shape == made[1].shape
    check_caches(loaded(result.path), prompt(name))


@torch.no_grad()
def test_latents_become_fewer_and_pictures_still_work(towers, tmp_path):
    source, asked = towers(MLA_INSIDE), ConvertSettings(**TEXT, kv_lora_rank=12)
    foreseen, result = plan_conversion(source, tmp_path / "foreseen", asked), converter.convert(source, None, asked)
    report, ladder = result.report, {row["stage"]: row for row in result.report.ladder}
    assert report.target["model_type"] == foreseen.target["model_type"] == "mistral3"
    assert report.kv["measured_bytes_per_token"] == foreseen.kv["bytes_per_token"] == 3 * (12 + 8) * 4
    assert ladder["rotated"]["logit_difference"] < 2e-5
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
    with pytest.raises(SurgeryError, match="convert the whole mistral3 checkpoint"):
        converter.convert(tmp_path / "alone", tmp_path / "out", asked)


def check_caches(model, given):
    """One pass, the same through a cache, and behind padding; and the picture is seen."""
    whole = model(**given).logits
    close = {"rtol": 0, "atol": 1e-4 * float(whole.abs().max())}
    per_token = [key for key in given if key in ("input_ids", "attention_mask", "mm_token_type_ids")]
    cache, first = DynamicCache(config=model.config), {key: given[key][:, :-3] for key in per_token}
    pieces = [model(**{**given, **first}, past_key_values=cache).logits]
    pieces += [model(input_ids=token, past_key_values=cache).logits for token in given["input_ids"][:, -3:].split(1, 1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **close)

    padding = {"input_ids": 2, "attention_mask": 0, "mm_token_type_ids": 0}
    padded = {key: torch.nn.functional.pad(given[key], (5, 0), value=padding[key]) for key in per_token}
    torch.testing.assert_close(model(**{**given, **padded}).logits[:, 5:], whole, **close)

    other = model(**{**given, "pixel_values": -given["pixel_values"]}).logits
    assert float((other - whole).abs().max()) > 10 * close["atol"]


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_heads_that_say_the_same_merge_exactly_beside_pictures(towers, tmp_path, name):
    """The second KV head is the first, each pair turned and stretched, values mixed: positions of pictures included."""
    source = shutil.copytree(towers(name), tmp_path / "source")
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
    if name == "qwen2_5_vl":  # as its checkpoints on the hub have it
        config = json.loads((source / "config.json").read_text())
        config = {**config, **config.pop("text_config"), "model_type": name, "rope_theta": 1e4}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": config.pop("rope_parameters")["mrope_section"]}
        (source / "config.json").write_text(json.dumps(config))
    result = converter.convert(source, tmp_path / "out", KVHeadsSettings(**TEXT, fit_steps=0, batch_size=2))
    given = prompt(name)
    before, after = (loaded(folder)(**given).logits for folder in (source, result.path))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4 * float(before.abs().max()))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_evaluation_runs_what_reads_the_text(towers, name):
    """Its loss is that of the whole model on the same tokens."""
    checkpoint = Checkpoint.open(str(towers(name)))
    ids = torch.randint(3, IMAGE, (2, 48), generator=torch.Generator().manual_seed(3))
    alone, whole = checkpoint.load(torch.device("cpu")), loaded(towers(name))
    torch.testing.assert_close(alone(ids).logits, whole(ids).logits, rtol=0, atol=1e-5)
    assert alone.config.model_type == {"llava": "llama", "qwen2_5_vl": "qwen2"}[name]


def test_healing_writes_the_language_model_in_its_place(towers, tmp_path):
    name = "qwen2_5_vl"
    converter.convert(towers(name), tmp_path / "converted", replace(HALF, fit_steps=0))
    given = {"teacher": str(towers(name)), "data": [str(HELD_OUT)], "max_steps": 2, "length": 64, "train": "lora"}
    given |= {"warmup": 0, "held_out": 1, "lora_modules": ["q_proj", "v_proj"]}
    asked = HealRequest(str(tmp_path / "converted"), tmp_path / "healed", given=given, measure=None)
    assert plan_healing(asked).estimate
    healed = heal_checkpoint(asked).path
    before, after = weights(tmp_path / "converted"), weights(healed)
    assert list(after) == list(before)
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    assert len(changed) >= 4 and all(key.split(".")[-2] in PROJECTIONS and "layers." in key for key in changed)
    assert not any("vis" in key for key in changed)
    config = "config.json"
    assert json.loads((healed / config).read_text()) == json.loads((tmp_path / "converted" / config).read_text())
    assert loaded(healed)(**prompt(name)).logits.isfinite().all()
    assert {check.outcome for check in verify_checkpoint(healed, device="cpu").checks} == {PASSED}


@pytest.mark.parametrize("to", ["mla", "lowrank", "crosslayer", "hybrid", "quantized"])
def test_what_holds_a_language_model_alone_is_refused(towers, tmp_path, to):
    settings = TARGETS[to].settings({"streaming": 1.0} if to == "hybrid" else {})
    with pytest.raises(SurgeryError, match=r"llava is a model of pictures and text.*--to gqa"):
        converter.convert(towers("llava"), tmp_path / "out", settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    [{"bits": 8, "group": 8}, {"allocate": "spectrum"}, {"carrier": "own"}, {"method": "key-norm"}, {"engine": "vllm"}],
    ids=str,
)
def test_what_would_be_of_another_class_is_refused(towers, tmp_path, asked):
    with pytest.raises(SurgeryError, match="stays in its class"):
        converter.convert(towers("qwen2_5_vl"), tmp_path / "out", KVHeadsSettings(**TEXT, **asked))
    assert list(tmp_path.iterdir()) == []
