"""Layers that a conversion leaves unchanged: by number, or because their windows forget anyway."""

import shutil

import pytest
import torch
from config_files import config_of
from conversions import convert_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import SHORT_TEXT
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.console.conversion import show_conversion
from surgery.engines.facts import Facts
from surgery.inspection.inspect import inspect_checkpoint
from surgery.model import SurgeryConfig
from surgery.structures.dry_run import plan_conversion
from surgery.structures.kept_layers import kept_layers
from surgery.structures.registry import TARGETS

QUICK = {**SHORT_TEXT, "kv_ratio": 0.5, "batch_size": 2}
ATTENTION = "model.layers.{}.self_attn."
FULL = 256
"""Bytes of a token in the source: two layers, K and V of two heads of 8 numbers in fp32."""


def converted(source, out, to, **settings):
    """Report, tensors and config; shown as the command does it, in a table of layers that were measured and kept
    ones."""
    conversion = convert_checkpoint(source, out, TARGETS[to].settings({**QUICK, **settings}))
    show_conversion(conversion)
    return conversion.report.to_dict(), load_file(out / "model.safetensors"), config_of(out)


@pytest.mark.parametrize(
    ("to", "overrides"),
    [
        ("lowrank", {}),
        ("mla", {"carrier": "own"}),
        ("lowrank", {"bits": "auto"}),
        pytest.param("lowrank", {"method": "palu"}, marks=pytest.mark.slow),
        pytest.param("mla", {"allocate": "spectrum"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_a_kept_layer_is_the_sources_and_counts_whole(to, overrides, checkpoints, tmp_path):
    """The conversion itself has checked that the written model computes and caches what was simulated."""
    source = checkpoints("llama")
    settings = TARGETS[to].settings({**QUICK, "keep_layers": "-1", **overrides})
    forecast = plan_conversion(source, tmp_path / "forecast", settings)
    report, tensors, config = converted(source, tmp_path / "out", to, keep_layers="-1", **overrides)
    original = load_file(source / "model.safetensors")
    entries = {name: tensor for name, tensor in original.items() if name.startswith(ATTENTION.format(1))}
    assert len(entries) == 4 and all(torch.equal(tensors[name], tensor) for name, tensor in entries.items())
    assert config["model_type"] == "surgery" and config["attention_layers"][1] is None
    assert ATTENTION.format(0) + "k_proj.weight" not in tensors
    if "bits" not in overrides:
        assert report["kv"]["measured_bytes_per_token"] == FULL * (0.5 / 2 + 1 / 2)
        assert forecast.kv["bytes_per_token"] == report["kv"]["measured_bytes_per_token"]
    assert set(report["layers"][1]["measured"]) <= {"quantized"} and report["layers"][0]["measured"]


@pytest.mark.parametrize(("to", "overrides"), [("mla", {"carrier": "own"}), ("lowrank", {})])
def test_windowed_layers_stay_next_to_full_ones(to, overrides, checkpoints, tmp_path, capsys):
    source = checkpoints("gemma3_window")
    windows = AutoConfig.from_pretrained(source).layer_types
    report, _, config = converted(source, tmp_path / "out", to, **overrides)
    measured, output = report["layers"][-1]["measured"], capsys.readouterr().out
    assert not report["layers"][0]["measured"] and measured and all(stage in output for stage in measured)
    assert [entry is None for entry in config["attention_layers"]] == [kind != "full_attention" for kind in windows]
    predicted = SurgeryConfig.from_pretrained(tmp_path / "out")
    assert predicted.layer_types == windows and report["kv"]["ratio"] == 0.75
    every, _, config = converted(source, tmp_path / "every", to, keep_layers="none", **overrides)
    assert None not in config["attention_layers"] and every["kv"]["ratio"] == 0.5


def test_layers_of_a_state_stay_to_the_bit_and_count_nothing(checkpoints, tmp_path):
    """Next to them a layer that predicts further tokens, as Qwen's checkpoints have one: no class reads it."""
    source = shutil.copytree(checkpoints("qwen3_5_state"), tmp_path / "source")
    original = load_file(source / "model.safetensors") | {"mtp.fc.weight": torch.ones(2, 3)}
    save_file(original, source / "model.safetensors", {"format": "pt"})
    settings = TARGETS["lowrank"].settings({**QUICK, "keep_layers": "none"})
    forecast = plan_conversion(source, tmp_path / "forecast", settings)
    report, tensors, config = converted(source, tmp_path / "out", "lowrank", keep_layers="none")
    entries = [name for name in original if ".self_attn." not in name and name != "lm_head.weight"]
    assert all(torch.equal(tensors[name], original[name]) for name in entries) and "mtp.fc.weight" in entries
    assert config["attention_layers"][0] is None and config["attention_layers"][1]["kind"] == "low_rank"
    of_one = 4 * 2 * 2 * 16  # fp32, K and V, two heads of 16 numbers
    assert (
        inspect_checkpoint(source).kv["bytes_per_token"]
        == Facts.of(config_of(source)).cache(4)["cache_bytes_per_token"]
        == of_one
    )
    assert forecast.kv["bytes_per_token"] == report["kv"]["measured_bytes_per_token"] == of_one / 2
    assert inspect_checkpoint(tmp_path / "out").kv["bytes_per_token"] == of_one / 2
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    with pytest.raises(SurgeryError, match="leave at least one to convert"):
        converted(source, tmp_path / "none", "lowrank", keep_layers="1")
    with pytest.raises(SurgeryError, match="recurrent state"):
        converted(source, tmp_path / "none", "crosslayer")


def test_which_layers_are_meant():
    assert kept_layers("auto", (None, 8, 8, None)) == {1, 2}
    assert kept_layers("auto", (8, 8)) == kept_layers("auto", (None, None)) == kept_layers("none", (8, None)) == set()
    assert kept_layers("0, -1", (None,) * 4) == {0, 3}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("first", "must be layer indices such as 0,1,-1"),
        ("0,2", "keep_layers 2: the model has layers 0 to 1"),
        ("0,1", "all layers"),
    ],
)
def test_what_cannot_be_kept_is_refused(settings, message, checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match=message):
        converted(checkpoints("llama"), tmp_path / "out", "mla", keep_layers=settings)
    assert not (tmp_path / "out").exists()


def test_what_does_not_go_with_kept_layers(checkpoints, tmp_path):
    with pytest.raises(SurgeryError, match="--window: must apply to all layers"):
        converted(checkpoints("llama"), tmp_path / "out", "lowrank", keep_layers="0", window=8)
    with pytest.raises(SurgeryError, match="some layers keep their attention; drop --engine and --carrier stock"):
        converted(checkpoints("llama"), tmp_path / "out", "mla", keep_layers="0", carrier="stock")
