"""`surgery slice`, end to end on tiny models: the first latents of every block, and nothing else, in a checkpoint."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from tiny_models import HELD_OUT, SHORT_TEXT, tokens
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from surgery.architectures.sliced import LatentModel
from surgery.calibration.held_out import HeldOut
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.console.conversion import show_conversion
from surgery.eval.kv_cache import cache_bytes
from surgery.running.layer_stream import LayerStream, single_layer_config
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.slices.structure import SliceSettings, measure_slices

TEXT = {**SHORT_TEXT, "held_out": 2, "batch_size": 2}


def low_rank(**settings):
    return LowRankSettings(**{"kv_ratio": 0.5, **TEXT, **settings})


def mla(**settings):
    return ConvertSettings(**{"kv_lora_rank": 16, "rope_dim": 6, **TEXT, **settings})


KINDS = {
    "joint": ("llama_bias", low_rank()),
    "separate": ("llama", low_rank(method="separate")),
    "palu": ("llama", low_rank(method="palu")),
    "window": ("llama", low_rank(window=5, sinks=2)),
    "mla own": ("llama_bias", mla(carrier="own", kv_lora_rank=None, rope_dim=None, kv_ratio=0.7)),
    "mla key norm": ("qwen3", mla(kv_lora_rank=26)),
    "mla windows": ("mistral_window", mla()),
}
# What differs from another kind in how it was made, not in what a slice has to know of it, is slow.
ALIKE = "palu", "mla windows"
TRIED = [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ALIKE)) for kind in KINDS]
RATIO = 0.4  # less than any of these has


@pytest.fixture(scope="module")
def converted(conversions):
    return lambda kind: conversions(*KINDS[kind])


@pytest.fixture(scope="module")
def sliced(converted, tmp_path_factory):

    @cache
    def get(kind, ratio=RATIO, **settings):
        out = tmp_path_factory.mktemp("slice") / "out"
        return convert_checkpoint(converted(kind).path, out, slice_settings(ratio, **settings))

    return get


def slice_settings(ratio=RATIO, **settings):
    return SliceSettings(kv_ratio=ratio, **{**TEXT, **settings})


def block_ranks(path) -> list[list[int]]:
    """Latents of each block of each layer, as the config has it."""
    config = AutoConfig.from_pretrained(path)
    return [
        [block["rank"] for block in entry["blocks"]] if entry["kind"] == "low_rank" else [entry["kv_lora_rank"]]
        for entry in config.attention_layers
    ]


def forget(model, whole, entries):
    """Let a model's attention read the first latents of every block only: no cached value changes."""

    def dropped(sizes, first):
        return torch.cat([torch.arange(size) >= keep for size, keep in zip(sizes, first, strict=True)])

    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention, before, after = layer.self_attn, whole[index], entries[index]
            if hasattr(attention, "query_up"):
                attention.query_up[..., : before[0]][..., dropped(before, after)] = 0
                attention.value_up[..., dropped(before, after)] = 0
            else:
                for number in range(len(before)):
                    columns = dropped([before[number]], [after[number]])
                    for ups in (attention.key_up.matrices(), attention.value_up.matrices()):
                        if number in ups:
                            ups[number][:, columns] = 0
    return model


@pytest.mark.parametrize("kind", TRIED)
@torch.no_grad()
def test_a_slice_is_the_whole_model_without_its_last_latents(converted, sliced, kind):
    result = sliced(kind)
    whole, entries = block_ranks(converted(kind).path), block_ranks(result.path)
    assert sum(map(sum, entries)) < sum(map(sum, whole))
    assert all(0 < new <= old for a, b in zip(entries, whole, strict=True) for new, old in zip(a, b, strict=True))
    model = AutoModelForCausalLM.from_pretrained(converted(kind).path).eval()
    expected = forget(model, whole, entries)(tokens()).logits
    logits = AutoModelForCausalLM.from_pretrained(result.path).eval()(tokens()).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    stages = {row["stage"]: row["loss"] for row in result.report.ladder}
    assert list(stages) == ["before slicing", "sliced", "reloaded"]
    assert stages["before slicing"] == pytest.approx(converted(kind).report.ladder[-1]["loss"], abs=1e-5)
    assert stages["reloaded"] == pytest.approx(stages["sliced"], abs=1e-5)


@pytest.mark.parametrize("kind", TRIED)
@torch.no_grad()
def test_the_budget_is_met_by_the_live_cache(converted, sliced, kind):
    result, whole = sliced(kind), converted(kind).report
    kv, name = result.report.kv, KINDS[kind][0]
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
    assert kv["source_bytes_per_token"] == whole.kv["measured_bytes_per_token"]
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    if kind == "window":
        return
    budget = RATIO * whole.kv["source_bytes_per_token"]
    assert budget - 4 < kv["measured_bytes_per_token"] <= budget
    length = 12 if "window" in name else 30
    numbers = sum(map(sum, block_ranks(result.path)))
    if kind.startswith("mla"):
        rotated = whole.target["rope_dims"]
        assert (len(set(rotated)) > 1) == (kind == "mla own")
        numbers += sum(rotated) + len(rotated) * {"mla key norm": 2}.get(kind, 0)
    cache = model(tokens(3, length), use_cache=True).past_key_values
    assert cache_bytes(cache) == 3 * length * numbers * 4
    assert kv["measured_bytes_per_token"] == numbers * 4


def test_the_residual_window_stays(converted, sliced):
    path, whole = sliced("window").path, converted("window").path
    entries = AutoConfig.from_pretrained(path).attention_layers
    assert all((entry["window"], entry["sinks"]) == (5, 2) for entry in entries)
    for name in ("k_proj.weight", "v_proj.weight"):
        name = f"model.layers.1.self_attn.{name}"
        assert torch.equal(CheckpointReader.open(path).tensor(name), CheckpointReader.open(whole).tensor(name))


@pytest.mark.parametrize(
    "kind",
    [
        "separate",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("palu", "mla key norm")),
    ],
)
def test_a_slice_of_a_slice_is_a_slice(converted, sliced, kind, tmp_path):
    how = {"allocate": "uniform" if kind == "palu" else "spectrum", "calibration": "none"}
    once, half = sliced(kind, 0.3, **how), sliced(kind, **how)
    twice = convert_checkpoint(half.path, tmp_path / "twice", slice_settings(0.3, **how))
    first, second = CheckpointReader.open(once.path), CheckpointReader.open(twice.path)
    assert first.names() == second.names()
    for name in first.names():
        torch.testing.assert_close(second.tensor(name), first.tensor(name), atol=0, rtol=1e-6)
    chain = json.loads((twice.path / REPORT).read_text())
    stages = [chain, chain["previous"], chain["previous"]["previous"]]
    assert [report["target"].get("sliced", False) for report in stages] == [True, True, False]
    assert twice.report.target["ratio_to_original"] <= 0.3


def test_ranks_follow_energies_or_shares(converted, sliced):
    layers = converted("joint").report.layers
    ranks = sliced("joint", allocate="spectrum").report.target["ranks"]
    entries = min(layer.energies[rank - 1] for layer, rank in zip(layers, ranks, strict=True))
    dropped = [layer.energies[rank] for layer, rank in zip(layers, ranks, strict=True) if rank < sum(layer.ranks)]
    assert all(loss <= entries for loss in dropped)
    uniform = sliced("joint", allocate="uniform").report.target["ranks"]
    assert sum(uniform) == sum(ranks)
    shares = [rank / sum(layer.ranks) for layer, rank in zip(layers, uniform, strict=True)]
    assert max(shares) - min(shares) < 1 / min(sum(layer.ranks) for layer in layers)
    loss = [layer.latent_error for layer in sliced("joint", allocate="spectrum").report.layers]
    expected = [sum(layer.energies[rank:]) for layer, rank in zip(layers, ranks, strict=True)]
    assert loss == pytest.approx(expected)


def test_the_best_of_several_allocations_is_taken(sliced):
    report = sliced("joint").report
    losses = report.target["allocations"]
    assert set(losses) == {"uniform", "spectrum", "between"}
    assert {row["stage"]: row["loss"] for row in report.ladder}["sliced"] == min(losses.values())
    for name in ("uniform", "spectrum"):
        alone = sliced("joint", allocate=name).report
        assert alone.target["allocations"] == {name: pytest.approx(losses[name], abs=1e-6)}
    assert list(sliced("palu").report.target["allocations"]) == ["uniform"]


@pytest.mark.parametrize("kind", ["window", "mla own"])
def test_nothing_is_lost_with_all_latents(converted, kind):
    reader = CheckpointReader.open(converted(kind).path)
    model, config = LatentModel.of(reader), AutoConfig.from_pretrained(reader.path)
    stream, held_out = LayerStream(reader, config, single_layer_config), HeldOut.of_text(tokens())
    measured = measure_slices(stream, model, {"all": model.ranks}, held_out, 1, Progress(silent=True))
    assert all(error == {"sliced": 0} for error in measured.errors)
    assert measured.score == measured.before


@pytest.mark.parametrize("kind", ["joint", "mla own"])
@torch.no_grad()
def test_the_first_latents_are_better_than_others(converted, kind):
    """Compare, of one layer on text, the errors of the attention with other latents left out, as many of them."""
    path = converted(kind).path
    text = AutoTokenizer.from_pretrained(path)(HELD_OUT.read_text()[:4000], return_tensors="pt").input_ids[:, :240]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    attention = model.model.layers[0].self_attn
    down = attention.kv_down
    rank = block_ranks(path)[0][0]
    outputs = []
    attention.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    weight, bias = down.weight.clone(), None if down.bias is None else down.bias.clone()

    def error(dropped):
        down.weight[dropped] = 0
        if bias is not None:
            down.bias[dropped] = 0
        outputs.clear()
        model(text.view(4, 60))
        down.weight.copy_(weight)
        if bias is not None:
            down.bias.copy_(bias)
        return float((outputs[0] - exact).norm() / exact.norm())

    model(text.view(4, 60))
    exact = outputs[0]
    generator = torch.Generator().manual_seed(0)
    others = [error(torch.randperm(rank, generator=generator)[rank // 2 :]) for _ in range(12)]
    assert error(torch.arange(rank // 2, rank)) < min(others)


def test_the_custom_class_keeps_its_code(converted, sliced):
    """The files that load it where the package is not installed."""
    path, whole = sliced("joint").path, converted("joint").path
    assert type(AutoModelForCausalLM.from_pretrained(path)).__name__ == "SurgeryForCausalLM"
    files = {file.name: file.read_bytes() for file in path.glob("*.py")}
    assert files == {file.name: file.read_bytes() for file in whole.glob("*.py")}
    config = json.loads((path / "config.json").read_text())
    assert {f"{name.partition('.')[0]}.py" for name in config["auto_map"].values()} <= set(files)


@pytest.mark.parametrize("kind", ["joint", "palu", "mla key norm"])
def test_what_is_told_of_a_slice(sliced, kind, capsys):
    result = sliced(kind)
    show_conversion(result)
    assert "before slicing" in capsys.readouterr().out
    card = (result.path / "README.md").read_text()
    assert "before slicing" in card and "latent" in card
    assert (result.path / "README.source.md").is_file() and (result.path / "tokenizer.json").is_file()
    layers = json.loads((result.path / REPORT).read_text())["layers"]
    assert all(0 <= layer["latent_error_share"] < 1 for layer in layers)
    assert max(layer["measured"]["sliced"] for layer in layers) > 0


def test_weights_alone(checkpoints, tmp_path):
    settings = ConvertSettings(calibration="none", carrier="own", kv_lora_rank=16, rope_dim=6)
    whole = convert_checkpoint(checkpoints("llama"), tmp_path / "whole", settings)
    result = convert_checkpoint(whole.path, None, SliceSettings(kv_ratio=0.4, calibration="none"))
    assert result.path == (tmp_path / "whole-sliced").resolve()
    assert result.report.target["kv_lora_ranks"] == [7, 6]
    with pytest.raises(SurgeryError, match="needs latents measured by the loss"):
        convert_checkpoint(whole.path, tmp_path / "out", SliceSettings(kv_ratio=0.4, allocate="spectrum"))


def test_what_cannot_be_sliced_is_refused(checkpoints, converted, tmp_path):
    earlier = Path(__file__).with_name("old_checkpoints")
    joint, stock = converted("joint").path, earlier / "mla-stock"
    plain, in_groups, loss_increase, old = (tmp_path / name for name in ("plain", "in_groups", "lost", "old"))
    shutil.copytree(earlier / "quantized", plain)
    edit_config(plain, "kv_cache")
    shutil.copytree(joint, in_groups)
    edit_config(in_groups, kv_cache={"format": "int4", "group": 16, "window": 0, "keys": "channel"})
    shutil.copytree(joint, loss_increase)
    (loss_increase / REPORT).unlink()
    shutil.copytree(joint, old)
    report = json.loads((old / REPORT).read_text())
    for layer in report["layers"]:
        del layer["energies"]
    (old / REPORT).write_text(json.dumps(report))
    for source, ratio, message in (
        (checkpoints("llama"), 0.25, "model_type 'llama' cannot be sliced; convert"),
        (stock, 0.25, "model_type 'deepseek_v3' cannot be sliced; convert"),
        (in_groups, 0.25, "quantized; slice its source"),
        (earlier / "cascade", 0.25, "caches in bits and cascades cannot be sliced"),
        (plain, 0.25, "the family's own attention"),
        (loss_increase, 0.25, "which surgery slice requires"),
        (old, 0.25, "has no energies of the latents"),
        (joint, 0.5, "must be less"),
        (joint, 0.9, "must be less"),
        (joint, 0.01, "too small"),
    ):
        with pytest.raises(SurgeryError, match=message):
            convert_checkpoint(source, tmp_path / "out", slice_settings(ratio))
        assert not (tmp_path / "out").exists()
    with pytest.raises(SurgeryError, match="--overwrite"):
        convert_checkpoint(joint, loss_increase, slice_settings())
    with pytest.raises(SurgeryError, match="--kv-ratio"):
        SliceSettings()
    with pytest.raises(SurgeryError, match="choose auto, uniform, spectrum"):
        slice_settings(allocate="largest")


def test_a_rotated_latent_has_no_order(converted, tmp_path):
    """Checkpoints of earlier versions, even where the quantized cache has been taken out of the config."""
    path = shutil.copytree(converted("joint").path, tmp_path / "rotated")
    report = json.loads((path / REPORT).read_text())
    report["target"]["hadamard"] = True  # as an earlier version wrote it
    (path / REPORT).write_text(json.dumps(report))
    with pytest.raises(SurgeryError, match="Hadamard rotation mixed its latents"):
        convert_checkpoint(path, tmp_path / "out", slice_settings())


def test_a_wrong_cut_is_caught_before_the_output_gets_its_name(converted, tmp_path, monkeypatch):
    """A choice of columns that no check of shapes can see."""
    from surgery.architectures import sliced

    right = sliced.Cut.of
    monkeypatch.setattr(sliced.Cut, "of", lambda cut, tensor: right(cut, tensor.flip(1) if cut.dim == 1 else tensor))
    with pytest.raises(SurgeryError, match="differ from the simulation"):
        convert_checkpoint(converted("joint").path, tmp_path / "out", slice_settings())
    assert list(tmp_path.iterdir()) == []
