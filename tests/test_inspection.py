"""Screens of `surgery inspect`, against numbers known by hand."""

import json
from functools import cache

import own_models
import pytest
import torch
from command_line import run_main
from config_files import edit_config
from tiny_models import SHAPE, make_checkpoint
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.bench import models as bench_models
from surgery.console.inspection import show_inspection
from surgery.engines.verdict import LOADS, LOADS_WITH
from surgery.eval.kv_cache import cache_bytes
from surgery.inspection.converted import _by_kind
from surgery.inspection.inspect import CONTEXTS, inspect_checkpoint
from surgery.structures.mla.structure import stock_mla
from surgery.structures.registry import TARGETS

pytestmark = pytest.mark.usefixtures("one_core")

# Two layers, two KV heads; 8 numbers a head unless the family sets 16; fp32.
BYTES_PER_TOKEN = {
    "llama": 2 * 2 * (8 + 8) * 4,
    "llama_bias": 2 * 2 * (8 + 8) * 4,
    "llama3": 2 * 2 * (16 + 16) * 4,
    "qwen2": 2 * 2 * (8 + 8) * 4,
    "qwen3": 2 * 2 * (16 + 16) * 4,
    "mistral_window": 2 * 2 * (8 + 8) * 4,
    "qwen3_moe": 2 * 2 * (16 + 16) * 4,
}


@pytest.fixture(scope="module")
def inspected(checkpoints):
    """Gives what is said of a tiny checkpoint, asked for once."""
    return cache(lambda name: inspect_checkpoint(checkpoints(name)))


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_kv_bytes(name, inspected):
    kv = inspected(name).kv
    assert kv["bytes_per_token"] == BYTES_PER_TOKEN[name]
    assert kv["bytes_per_token_and_layer"] * 2 == BYTES_PER_TOKEN[name]
    assert list(kv["bytes_at"]) == list(CONTEXTS)


def test_kv_bytes_are_those_of_a_live_cache_in_the_checkpoints_dtype(checkpoints):
    path = checkpoints("llama", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(10)[None] + 5, past_key_values=cache)
    assert inspect_checkpoint(path).kv["bytes_per_token"] * 10 == cache_bytes(cache)


def test_windows_bound_the_cache(inspected):
    everywhere = inspected("mistral_window")
    assert everywhere.windows == [16, 16]
    assert set(everywhere.kv["bytes_at"].values()) == {15 * 256}  # less the query's own token
    some = inspected("qwen2_window")
    assert some.windows == [None, 16]
    assert some.kv["bytes_at"][8192] == (8192 + 15) * 128
    none = inspected("llama")
    assert none.windows == [None, None]
    assert none.kv["bytes_at"][131072] == 131072 * 256


def test_architecture(checkpoints, inspected):
    facts = inspected("llama3").architecture
    assert facts["rope_type"] == "llama3" and facts["rope_theta"] == 500_000.0
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"], facts["hidden"]) == (4, 2, 16, 32)
    assert facts["max_positions"] == 256 and facts["vocabulary"] == 4096
    assert facts["biases"] == [] and not facts["qk_norm"] and not facts["tied_embeddings"]

    tied = inspected("llama").architecture
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    assert tied["tied_embeddings"] and tied["dtype"] == "float32"
    assert tied["parameters"] == sum(parameter.numel() for parameter in model.parameters())

    assert inspected("qwen2").architecture["biases"] == ["q", "k", "v"]
    assert inspected("llama_bias").architecture["biases"] == ["q", "k", "v", "o"]
    assert inspected("qwen3").architecture["qk_norm"]
    assert inspected("qwen3_moe").architecture["experts"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("qwen3", "q/k-norm"), ("mistral_window", "sliding windows"), ("mixtral", "mixture of experts")],
)
def test_what_stock_cannot_carry_goes_to_the_custom_class_with_the_reason(name, reason, inspected):
    targets = inspected(name).targets
    assert {target["class"] for target in targets if "mla" in target["command"] and target["applies"]} == {"surgery"}
    stock = next(target for target in targets if target["command"].endswith("--carrier stock"))
    assert reason in " ".join(stock["reasons"])


@pytest.mark.parametrize(
    ("name", "model_class"),
    [("llama", "llama"), ("mixtral", "mixtral"), ("mistral_window", "mistral"), ("qwen3", None)],
)
def test_fewer_heads_are_a_target_unless_a_norm_stands_between(name, model_class, inspected):
    targets = {target["command"]: target for target in inspected(name).targets}
    target = targets["surgery convert --to gqa"]
    assert target["class"] == model_class
    assert target["applies"] or "q/k-norm" in target["reasons"][0]


def test_every_target_that_needs_the_custom_class_says_why(inspected):
    targets = {target["command"]: target for target in inspected("llama").targets}
    words = {"lowrank": "rebuilds", "crosslayer": "a few bits", "quantized": "a few bits"}
    words["hybrid --streaming 1"] = "streaming heads in one layer"
    for name, word in words.items():
        target = targets[f"surgery convert --to {name}"]
        assert target["class"] == "surgery" and word in target["reasons"][0], name
    for name, ratio in {"quantized": 0.25, "crosslayer": 0.125}.items():
        assert targets[f"surgery convert --to {name}"]["kv_ratio"] == pytest.approx(ratio, rel=0.05)


def test_caches_that_take_no_sliding_windows_do_not_apply_to_them(inspected):
    targets = {target["command"]: target for target in inspected("mistral_window").targets}
    assert targets["surgery convert --to lowrank"]["applies"]
    for name in ("crosslayer", "hybrid --streaming 1", "quantized"):
        target = targets[f"surgery convert --to {name}"]
        assert not target["applies"] and "sliding" in target["reasons"][0], name


def test_shares_of_a_model_with_windows_are_told_at_its_limit(inspected, capsys):
    """Windows hold less and less of a long text, so layers without one decide."""
    inspection = inspected("gemma3_window")
    target = next(each for each in inspection.targets if each["command"] == "surgery convert --to lowrank")
    limit = str(inspection.architecture["max_positions"])
    assert list(target["kv_ratio_at"]) == [limit] and target["kv_ratio_at"][limit] < 0.95 * target["kv_ratio"]
    show_inspection(inspection)
    shown = capsys.readouterr().out
    assert f"{target['kv_ratio_at'][limit]:.1%} at {limit}" in shown and f"{target['kv_ratio']:.1%}" not in shown


def test_what_forgets_everything_is_no_row_of_the_table(inspected, capsys):
    show_inspection(inspected("llama"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "--to hybrid --streaming 1" in line]
    assert len(lines) == 1 and "all heads stream" in lines[0]


def test_every_target_is_foreseen_with_its_class_and_its_bytes(inspected):
    targets = {target["command"]: target for target in inspected("llama").targets}
    assert {target["to"] for target in targets.values()} == set(TARGETS)
    for command, ratio in {"mla": 0.25, "gqa": 0.5, "mqa": 0.5, "lowrank": 0.25}.items():
        assert targets[f"surgery convert --to {command}"]["kv_ratio"] == pytest.approx(ratio, rel=1e-3), command
    assert targets["surgery convert --to mla"]["class"] == "surgery"
    assert targets["surgery convert --to mla --carrier stock"]["class"] == "deepseek_v3"
    assert targets["surgery convert --to mla --engine llama.cpp"]["engines"]["llama.cpp"]["command"].endswith(".gguf")


def test_a_rope_that_one_target_takes_is_the_reason_of_the_others(tmp_path):
    path = make_checkpoint(tmp_path / "src", "llama")
    edit_config(path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    inspection = inspect_checkpoint(path)
    assert inspection.kv["bytes_per_token"] == 256
    for target in inspection.targets:
        assert target["applies"] == (target["to"] == "hybrid")
        assert target["applies"] or "but hybrid" in target["reasons"][0]


def test_verbose_shows_the_verdict_of_every_engine(inspected, checkpoints, monkeypatch, capsys):
    targets = [target for target in inspected("llama").targets if target["applies"]]
    texts = {" ".join(row["text"].split()) for target in targets for row in target["engines"].values()}
    for flags, every in (([], False), (["--verbose"], True)):
        monkeypatch.setenv("COLUMNS", "1000")
        code, output, _ = run_main(monkeypatch, capsys, "inspect", checkpoints("llama"), *flags)
        assert code == 0
        assert all(text in " ".join(output.split()) for text in texts) == every


def test_healing_is_advised_after_conversions_that_lose_more_than_bits(inspected, capsys):
    inspection = inspected("llama")
    show_inspection(inspection)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  for ")]
    rows = inspection.advice["engines"].values()
    healed = {f"{row['command'].removeprefix('surgery convert ')} (" for row in rows if row["class"] != "surgery"}
    assert healed and any(not line.endswith("surgery heal") for line in lines)
    assert all(any(name in line for name in healed) == line.endswith("surgery heal") for line in lines)


def test_shown_and_printed_as_json(inspected, capsys):
    inspection = inspected("llama")
    show_inspection(inspection)
    output = capsys.readouterr().out
    assert "\x1b" not in output  # plain where standard output is no terminal
    assert "256 B" in output
    show_inspection(inspection, as_json=True)
    assert json.loads(capsys.readouterr().out)["architecture"]["vocabulary"] == SHAPE["vocab_size"]


@pytest.mark.parametrize("kind", ["latent", "low_rank", "quantized"])
@torch.no_grad()
def test_a_converted_checkpoint_says_what_it_caches(kind, tmp_path, capsys):
    source = own_models.tiny_source("llama")
    quantized = {"kv_cache": {"format": "int8", "group": 8, "window": 0, "keys": "token"}}
    if kind == "low_rank":
        model = own_models.lossless_low_rank(source, [own_models.low_rank_entry() for _ in range(own_models.LAYERS)])
    else:
        model = own_models.lossless_model(source, **(quantized if kind == "quantized" else {}))
    model.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    # As many numbers as keys and values had: 16 of each.
    assert inspection.kv["bytes_per_token"] == round(model.kv_cache_bytes(1, CONTEXTS[-1]) / CONTEXTS[-1])
    ratio = {"quantized": 4 / (1 + 2 * 4 / 8)}.get(kind, 1.0)
    assert inspection.kv["bytes_per_token_and_layer"] == pytest.approx(128 / ratio, rel=1e-3)
    assert inspection.targets == []
    json.dumps(inspection.to_dict())
    show_inspection(inspection)
    output = capsys.readouterr().out
    assert "surgery over llama" in output and "\nNext: surgery doctor CKPT " in output
    assert ("keys rebuilt from latents of rank 32" if kind == "low_rank" else "latent rank 16, 16 rotary") in output


def test_many_kinds_of_layers_are_shown_by_ranges():
    kinds = [f"latents of {size}, {size / 8:g} B per token" for size in (24, 1_000, 32, 40, 48, 56, 64, 64)]
    assert _by_kind(kinds) == ["8 layers: latents of 24 to 1000, 3 to 125 B per token"]
    assert _by_kind(kinds[-3:]) == ["1 layer: latents of 56, 7 B per token", "2 layers: latents of 64, 8 B per token"]


def test_stock_mla_is_inspected(tmp_path):
    config = stock_mla(bench_models.source_config("tiny"), 24, 8)
    bench_models.random_model(config, torch.device("cpu")).save_pretrained(tmp_path)
    alone = inspect_checkpoint(tmp_path)
    assert alone.architecture["attention"][0].startswith("2 layers: latent rank 24, 8 rotary dimensions")
    assert alone.kv["bytes_per_token"] == 2 * (24 + 8) * 4 and alone.targets == []


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window", "ministral_window", "mixtral"])
def test_what_is_said_can_be_done(name, checkpoints):
    inspection = inspect_checkpoint(checkpoints(name))
    selection, rows = inspection.advice, [row for row in inspection.targets if row["applies"]]
    assert selection["quality"] in rows and selection["smallest"]["applies"]
    at_limit = [row["kv_ratio_at"]["256"] for row in (selection["smallest"], *rows) if row["to"] != "hybrid"]
    assert at_limit[0] == min(at_limit)
    assert "hybrid" not in {selection["quality"]["to"], selection["smallest"]["to"]}
    for engine, row in selection["engines"].items():
        assert row in rows and row["engines"][engine]["status"] in (LOADS, LOADS_WITH)
    assert ("llama.cpp" in selection["engines"]) == (name == "llama")


def test_where_nothing_applies_nothing_is_said(checkpoints, capsys, monkeypatch):
    refused = {"applies": False, "class": None, "reasons": ["no"], "engines": {}}
    monkeypatch.setattr(
        "surgery.inspection.targets._row",
        lambda opened, target, asked, *_: {"command": "", "to": target.name, **refused},
    )
    inspection = inspect_checkpoint(checkpoints("llama"))
    assert inspection.advice == {}
    show_inspection(inspection)
    assert "recommended (" not in capsys.readouterr().out
