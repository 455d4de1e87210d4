"""MLA models as sources: what they compute, fewer latents of theirs, and what is refused."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from decoding import after_padding, in_pieces
from loading import run_elsewhere
from safetensors.torch import load_file, save_file
from tiny_models import LATENT_CONFIGS, SHORT_TEXT, make_checkpoint, needs_constant_norm, tokens
from transformers import AutoModelForCausalLM

from surgery.calibration.statistics import LayerStatistics
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.console.inspection import show_inspection
from surgery.engines.verdict import LOADS
from surgery.families import LATENT_FAMILIES, latent_family_of
from surgery.families.attention import CapturedAttention, attend, output
from surgery.inspection.inspect import inspect_checkpoint
from surgery.planning.plan import make_plan
from surgery.planning.settings import PlanSettings
from surgery.running.source import Source
from surgery.structures.dry_run import plan_conversion
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import TARGETS
from surgery.transforms.smaller_latent import norm_error, smaller_latent

FIRST = "deepseek_v2", "deepseek_v3", "glm4_moe_lite"
"""Families that are converted and run by default."""


def opened(folder) -> Source:
    reader = CheckpointReader.open(folder)
    return Source.of(reader, ConvertSettings(device="cpu"), latent_family_of(reader.config))


def inputs(anatomy, count: int = 64) -> torch.Tensor:
    return torch.randn(4, count, anatomy.hidden, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def statistics_of(anatomy, x: torch.Tensor) -> LayerStatistics:
    """Return the statistics of inputs, with a random metric."""
    projection = anatomy.project(x)
    rows = torch.cat([projection.k.flatten(2), projection.v.flatten(2)], dim=-1).flatten(0, 1)
    root = torch.randn(rows.shape[1], rows.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return LayerStatistics(rows.mT @ rows / len(rows), root @ root.mT, torch.empty(0), torch.empty(0), len(rows))


def outputs(anatomy, x: torch.Tensor) -> torch.Tensor:
    return output(anatomy, attend(anatomy, anatomy.project(x)), x)


def off(result: torch.Tensor, want: torch.Tensor) -> float:
    return float((result - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("name", LATENT_CONFIGS)
@torch.no_grad()
def test_the_anatomy_is_what_the_class_computes(checkpoints, name):
    source = opened(checkpoints(name))
    hidden = source.stream.embed(tokens())
    for index in range(source.layers):
        with source.stream.layer(index) as layer:
            want = layer(hidden)
            assert off(layer(hidden, CapturedAttention(source.anatomy(index).to(torch.float32))), want) < 5e-6
            hidden = want


def test_latents_that_are_never_used_go_without_loss(checkpoints):
    """Neither into the attention nor into the norm: half of the latents are combinations of the others."""
    anatomy = opened(checkpoints("youtu")).anatomy(0).to(torch.float64)
    half = anatomy.rank // 2
    mix = torch.randn(half, half, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    down, bias = anatomy.down.clone(), anatomy.down_bias.clone()
    down[half : anatomy.rank], bias[half : anatomy.rank] = mix @ down[:half], mix @ bias[:half]
    anatomy = replace(anatomy, down=down, down_bias=bias)
    x = inputs(anatomy)
    result = smaller_latent(anatomy, statistics_of(anatomy, x), half)
    assert result.layer.rank == half and result.error < 1e-9 * float(result.energy.sum())
    assert norm_error(anatomy, result.layer, x) < 1e-7
    assert off(outputs(result.layer, x), outputs(anatomy, x)) < 1e-7


def test_the_metric_counts_what_a_wrong_norm_costs(checkpoints):
    """Without the norm's part, the subspace that a flat metric chooses by energy sees less of the norm."""
    anatomy = opened(checkpoints("minicpm3")).anatomy(1).to(torch.float64)
    x = inputs(anatomy)
    statistics = statistics_of(anatomy, x)
    errors = []
    for part in (0.0, 1.0, 10.0):
        rest = statistics.moment * part
        rest = rest * float((statistics.gradient @ statistics.moment).trace()) / anatomy.rank**2
        result = smaller_latent(anatomy, replace(statistics, gradient=statistics.gradient + rest), 8)
        errors.append(norm_error(anatomy, result.layer, x))
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in LATENT_CONFIGS]
)
@torch.no_grad()
def test_fewer_latents(checkpoints, tmp_path, name):
    source = checkpoints(name)
    result = convert_checkpoint(source, tmp_path / "out", ConvertSettings(**SHORT_TEXT, kv_lora_rank=10))
    report, stages = result.report, {row["stage"]: row for row in result.report.ladder}
    kv = report.kv
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] == 3 * (10 + 8) * 4
    assert kv["source_bytes_per_token"] == 3 * (16 + 8) * 4
    assert stages["rotated"]["logit_difference"] < 2e-5
    assert report.verification["logit_difference_to_simulation"] < 1e-5
    assert report.target["model_type"] == report.source["model_type"] in LATENT_FAMILIES
    assert 0 < report.target["norm_error"] == max(layer["norm_error"] for layer in report.to_dict()["layers"])
    assert report.target["engines"]["transformers"]["status"] == LOADS

    before, after = (load_file(folder / "model.safetensors") for folder in (source, result.path))
    changed = {key for key, tensor in after.items() if not torch.equal(tensor, before[key])}
    modules = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    assert before.keys() == after.keys() and changed == {key for key in after if any(part in key for part in modules)}

    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    text = tokens(2, 24)
    whole = model(text, use_cache=False).logits
    assert off(in_pieces(model, text)[0], whole) < 1e-5
    logits, cached, facts = run_elsewhere(result.path, text, tmp_path)
    assert off(logits, whole) < 1e-5 and off(cached, whole) < 1e-5
    assert facts["cached_numbers"] == 2 * 24 * 3 * (10 + 8)
    assert off(after_padding(model, text), whole) < 1e-5


def test_a_plan_weighs_fewer_latents(checkpoints):
    settings = PlanSettings(**{**SHORT_TEXT, "held_out": 2}, kv_ratio=0.7, context="64")
    plan = make_plan(checkpoints("deepseek_v3"), settings)
    assert {row.to for row in plan.rows} == {"mla"} and plan.chosen.kv_ratio <= 0.7
    assert plan.source["kv_bytes"] == 64 * 3 * 24 * 4


@torch.no_grad()
@pytest.mark.parametrize("name", LATENT_CONFIGS)
def test_inspection_tells_what_is_cached_and_what_comes_next(checkpoints, name, capsys):
    inspection = inspect_checkpoint(checkpoints(name))
    assert inspection.kv["bytes_per_token"] == 3 * (16 + 8) * 4 and len(inspection.windows) == 3
    assert inspection.architecture["attention"][0].startswith("3 layers: latent rank 16, 8 rotary dimensions")
    show_inspection(inspection)
    assert "--to mla --dry-run" in capsys.readouterr().out


def test_without_text_the_weights_choose(checkpoints, tmp_path):
    settings = ConvertSettings(calibration="none", kv_ratio=0.8)
    plan = plan_conversion(checkpoints("deepseek_v3"), tmp_path / "out", settings)
    report = convert_checkpoint(checkpoints("deepseek_v3"), tmp_path / "out", settings).report
    assert report.target["kv_lora_rank"] == 10  # the largest even number within 0.8 of 24
    assert plan.kv["bytes_per_token"] == report.kv["measured_bytes_per_token"] == 3 * 18 * 4
    assert plan.target["reasons"] == report.target["reasons"]


@pytest.mark.parametrize("norm", ["tiny", pytest.param("constant", marks=pytest.mark.slow)])
def test_what_was_converted_before_becomes_smaller_again(checkpoints, tmp_path, norm):
    """Convert sources whose norms do nothing, by eps or by a channel of a large constant."""
    source = checkpoints("llama") if norm == "tiny" else needs_constant_norm(tmp_path / "source")
    options = ConvertSettings(**SHORT_TEXT, kv_lora_rank=16, rope_dim=4, carrier="stock")
    first = convert_checkpoint(source, tmp_path / "first", options)
    extra = int(norm == "constant")
    again = convert_checkpoint(first.path, tmp_path / "again", ConvertSettings(**SHORT_TEXT, kv_lora_rank=12))
    layers = again.report.to_dict()["layers"]
    assert max(layer["norm_error"] for layer in layers) < (1e-3 if extra else 1e-5)
    assert again.report.kv["measured_bytes_per_token"] == 2 * (12 + 4) * 4
    assert again.report.to_dict()["previous"]["target"]["kv_lora_rank"] == 16


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    folder = make_checkpoint(tmp_path / "source", "deepseek_v3")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, num_nextn_predict_layers=1)
    result = convert_checkpoint(folder, tmp_path / "out", ConvertSettings(calibration="none"))
    assert "MTP layers are left out (1)" in result.report.target["reasons"]
    assert json.loads((result.path / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert load_file(result.path / "model.safetensors").keys() == tensors.keys() - {"model.layers.3.eh_proj.weight"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_lora_rank": 16}, "kv_lora_rank 16: the source has rank 16"),
        ({"kv_lora_rank": 7}, "an even"),
        ({"kv_ratio": 0.3}, "kv_lora_rank -2"),
        ({"kv_ratio": 0.5, "kv_lora_rank": 8}, "either kv_ratio or kv_lora_rank"),
        ({"rope_dim": 4}, "keeps its 8 rotary dimensions"),
        ({"method": "transmla"}, "chosen by the loss"),
        ({"allocate": "spectrum"}, "one rank for all layers"),
        ({"keep_layers": "0"}, "one rank for all layers"),
        ({"carrier": "own"}, "it keeps its class"),
        ({"bits": "auto"}, "rows of its latents are not supported yet"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_asked_of_an_mla_model(checkpoints, tmp_path, settings, message):
    with pytest.raises(SurgeryError, match=message) as refused:
        convert_checkpoint(checkpoints("deepseek_v2"), tmp_path / "out", ConvertSettings(**settings))
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "overrides"),
    [
        *((to, {}) for to in TARGETS if to not in ("mla", "quantized", "crosslayer", "hybrid")),
        *((to, {"calibration": "builtin"}) for to in ("quantized", "crosslayer")),
        ("hybrid", {"streaming": 1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_other_structures_refuse_an_mla_model(checkpoints, tmp_path, name, to, overrides):
    settings = TARGETS[to].settings({"calibration": "none", **overrides})
    with pytest.raises(SurgeryError, match=r"has MLA attention already|heads of stock MLA"):
        convert_checkpoint(checkpoints(name), tmp_path / "out", settings)
    assert not list(tmp_path.iterdir())


def test_attention_of_another_kind_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "source", "deepseek_v2")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.1.self_attn.indexer.wk.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(SurgeryError, match=r"unexpected tensor .*indexer\.wk\.weight: DeepseekV2ForCausalLM"):
        convert_checkpoint(folder, tmp_path / "out", ConvertSettings(calibration="none"))
    shutil.rmtree(folder)
    folder = make_checkpoint(tmp_path / "source", "deepseek_v2")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.kv_b_proj.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SurgeryError, match="kv_b_proj of layer 1 contains NaN or infinity"):
        convert_checkpoint(folder, tmp_path / "out", ConvertSettings(calibration="none"))
