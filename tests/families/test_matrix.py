"""Every family in every structure: exact stages, caches, padding, chunks, and processes without the package."""

import shutil
from collections.abc import Callable

import pytest
import torch
from config_files import edit_config
from conversions import STRUCTURE_TARGETS, convert_checkpoint
from decoding import after_padding, in_pieces
from loading import run_elsewhere
from safetensors.torch import load_file, save_file
from tiny_models import ALL, FAMILIES, SHORT_TEXT, tokens
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.engines.verdict import LOADS, LOADS_WITH
from surgery.eval.kv_cache import cache_bytes
from surgery.model import DECODERS
from surgery.structures import converter
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings

BATCH = {"batch_size": 2}
STRUCTURES: dict[str, Callable] = {
    "mla": lambda: ConvertSettings(**SHORT_TEXT, **BATCH, kv_ratio=0.5, allocate="uniform"),
    "gqa": lambda: KVHeadsSettings(**SHORT_TEXT, **BATCH),
    "lowrank": lambda: LowRankSettings(**SHORT_TEXT, **BATCH, kv_ratio=0.5),
    "crosslayer": lambda: CrossLayerSettings(**SHORT_TEXT, **BATCH, group_size=2),
    "hybrid": lambda: HybridSettings(calibration="none", streaming=1.0, sinks=2, recent=6),
    "quantized": lambda: QuantizedSettings(**SHORT_TEXT, **BATCH),
}
WINDOWED = "mla", "gqa", "lowrank"
"""Targets that take sliding windows, and layers that keep a state."""
ALL_SLIDE = "starcoder2_window", "phi3_window"
"""Models whose layers all have a window; others leave those that have one unchanged, and take rows of bits, too."""

FIRST = {
    "falcon3": ("mla",),
    "seed_oss": ("gqa",),
    "smollm3": ("lowrank",),
    "glm4": ("mla",),
    "cohere": ("crosslayer",),
    "cohere2_window": ("lowrank",),
    "stablelm": ("quantized",),
    "starcoder2": ("mla",),
    "gemma2_window": ("mla",),
    "gemma3_window": ("mla",),
    "gpt_oss_window": ("gqa",),
    "phi3_window": ("gqa",),
    "olmo2": ("lowrank",),
    "ministral3": ("mla", "hybrid"),
    "llama4_window": ("mla",),
    "qwen3_next_state": ("lowrank",),
    "qwen3_5_state": ("mla",),
    "gpt_neox": ("gqa",),
    "gpt2": ("lowrank",),
    "granite4_state": ("mla",),
    "apertus": ("crosslayer",),
    "helium": ("mla",),
    "nemotron": ("lowrank",),
    "qwen2_moe": ("lowrank",),
}
FIRST |= dict.fromkeys(
    (
        *("granite", "ministral_window", "glm", "starcoder2_window", "gemma2", "gpt_oss", "phi3"),
        *("olmo3_window", "llama4_plain_window", "qwen3_5_moe_state", "gpt_neox_sequential", "phi4_mini"),
        *("gemma", "granite4", "glm4_moe", "glm4_moe_norm", "internlm3", "arcee", "dots1", "ernie4_5"),
        *("granitemoe", "jais2"),
    ),
    (),
)
"""What each family is tested in by default: where what is its own meets what a structure does.

Granite's multipliers are granite4_state's, gemma's norms and embeddings gemma2_window's; tests/families/test_anatomy.py
runs the layers of every family, tests/test_convert_hybrid.py streams heads of glm4 and olmo2.
"""
ELSEWHERE = {
    ("falcon3", "mla"),
    ("gpt_neox", "gqa"),
    ("gpt2", "lowrank"),
    ("cohere", "crosslayer"),
    ("ministral3", "hybrid"),
    ("stablelm", "quantized"),
    ("gemma3_window", "mla"),
    ("qwen3_5_state", "mla"),
}
"""Of these, one for each set of files that travel next to the weights: run in a process without the package."""

REFUSED = {
    ("gemma3_window", "gqa"): "with a q/k-norm",
    ("gpt_oss", "hybrid"): "learned sinks; convert --to gqa",
    ("falcon3", "gqa"): "one KV head already",
    ("olmo2", "gqa"): "with a q/k-norm",
    ("olmo3_window", "gqa"): "with a q/k-norm",
    ("llama4_window", "gqa"): "with a q/k-norm",
    ("qwen3_next_state", "gqa"): "with a q/k-norm",
    ("qwen3_5_state", "gqa"): "with a q/k-norm",
    ("qwen3_5_moe_state", "gqa"): "with a q/k-norm",
    ("granite4_state", "gqa"): "have a recurrent state and no KV heads",
    ("phi4_mini", "mla"): "longrope changes its frequencies .* convert --to lowrank",
    ("glm4_moe_norm", "gqa"): "with a q/k-norm",
    ("apertus", "gqa"): "with a q/k-norm",
    ("dots1", "gqa"): "with a q/k-norm",
}

STOCK = "falcon3", "seed_oss", "phi3", "internlm3", "ernie4_5", "helium"
"""Families that stock ``deepseek_v3`` carries."""
READ_AS_OTHERS = "phi3", "phi3_window", "phi4_mini", "internlm3"
"""Families whose checkpoints are another family's but for names."""

NEW = [name for name in ALL if name not in FAMILIES]
MIXED = [name for name in NEW if name.endswith(("_window", "_state"))]
"""Models of which some layers do not keep all tokens."""
FORGETFUL = "ministral_window", "llama4_window", "qwen3_5_state", "granite4_state"
"""One model of each kind: windows, chunks, linear attention, Mamba."""


def takes_rows(name: str) -> bool:
    """Return whether a mixed model takes rows of bits next to its windows."""
    return name.endswith("_window") and name not in ALL_SLIDE


CASES = [
    pytest.param(name, to, marks=[] if to in FIRST.get(name, ()) else pytest.mark.slow)
    for name in NEW
    for to in STRUCTURES
    if (to in WINDOWED or name not in MIXED or (to == "quantized" and takes_rows(name))) and (name, to) not in REFUSED
]


def test_every_family_says_what_it_is_tested_in():
    missing = set(NEW) - set(FIRST)
    assert not missing, f"tests/families/test_matrix.py: give FIRST a line for {', '.join(sorted(missing))}"
    assert set(STRUCTURES) == STRUCTURE_TARGETS


@pytest.mark.parametrize(("name", "to"), CASES)
@torch.no_grad()
def test_a_family_in_a_structure(checkpoints, tmp_path, name, to):
    result = convert_checkpoint(checkpoints(name), tmp_path / "out", STRUCTURES[to]())
    kv, stages = result.report.kv, {row["stage"]: row for row in result.report.ladder}
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"]
    assert to != "mla" or result.report.target["model_type"] == ("deepseek_v3" if name in STOCK else "surgery")
    if to == "mla":
        assert max(stages[stage]["logit_difference"] for stage in ("merged", "rotated")) < 2e-5

    assert result.report.target["engines"]["transformers"]["status"] in (LOADS, LOADS_WITH)

    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    if to == "gqa" and name not in READ_AS_OTHERS:
        own = AutoConfig.from_pretrained(checkpoints(name)).model_type
        assert model.config.model_type == ("surgery" if own in DECODERS else own)
    text = tokens(2, 24)
    whole = model(text, use_cache=False).logits
    close = {"rtol": 0, "atol": (1e-2 if to in ("quantized", "crosslayer") else 1e-4) * float(whole.abs().max())}
    torch.testing.assert_close(in_pieces(model, text)[0], whole, **close)

    if (name, to) in ELSEWHERE or to not in FIRST[name]:
        stock = not hasattr(model.config, "attention_layers")
        logits, cached, _ = run_elsewhere(result.path, text, tmp_path, trust=not stock)
        torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(cached, whole, **close)

    torch.testing.assert_close(after_padding(model, text), whole, **close)


ROWS = {"kv_ratio": 0.5, "bits": "auto"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt_oss_window", ConvertSettings(**SHORT_TEXT, **ROWS)),
        ("llama4_window", QuantizedSettings(**SHORT_TEXT)),
    ],
)
@torch.no_grad()
def test_windows_keep_their_cache_next_to_rows(checkpoints, tmp_path, name, settings):
    result = convert_checkpoint(checkpoints(name), tmp_path / "out", settings)
    kv, limit = result.report.kv, {"gpt_oss_window": 15, "llama4_window": 79}[name]
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] < kv["source_bytes_per_token"]
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    text = tokens(2, limit + 9)
    whole, (pieces, cache) = model(text, use_cache=False).logits, in_pieces(model, text, (limit, 6, 1, 1, 1))
    close = {"rtol": 0, "atol": 1e-2 * float(whole.abs().max())}  # a value may round to its other neighbor
    torch.testing.assert_close(pieces, whole, **close)
    slides = [layer.keys.shape[-2] for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer]
    assert slides and set(slides) == {limit}
    assert cache_bytes(cache) == model.kv_cache_bytes(batch=2, tokens=limit + 9)
    reserved = model.reserved_cache(tokens=5)
    assert model(text[:, :5], past_key_values=reserved).past_key_values is reserved
    if name != "llama4_window":  # padding moves its chunks, in its own class too
        torch.testing.assert_close(after_padding(model, text, use_cache=False), whole, **close)


@pytest.mark.parametrize("name", ["mistral_window", "qwen3_5_state", "granite4_state"])
def test_rows_of_windows_and_next_to_states_are_refused_before_any_work(checkpoints, monkeypatch, tmp_path, name):
    monkeypatch.setattr(converter, "load_texts", None)
    with pytest.raises(SurgeryError, match="needs full attention in every converted layer"):
        convert_checkpoint(checkpoints(name), tmp_path / "out", ConvertSettings(**SHORT_TEXT, **ROWS))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "to", "reason"),
    [
        (name, to, r"full attention|sliding|no converted layers are adjacent")
        for name in FORGETFUL
        for to in STRUCTURES
        if to not in WINDOWED and not (to == "quantized" and takes_rows(name))
    ]
    + list({reason: (*case, reason) for case, reason in REFUSED.items()}.values()),
)
def test_what_a_structure_cannot_do_for_a_family_is_refused(checkpoints, tmp_path, name, to, reason):
    with pytest.raises(SurgeryError, match=reason):
        convert_checkpoint(checkpoints(name), tmp_path / "out", STRUCTURES[to]())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ministral3", "ministral3 changes its attention from token 128 on"),
        ("phi4_mini", "changes its frequencies beyond 128"),
    ],
)
def test_texts_over_what_is_simulated_are_refused(checkpoints, tmp_path, name, reason):
    settings = LowRankSettings(**{**SHORT_TEXT, "calibration_tokens": 512, "calibration_length": 256}, kv_ratio=0.5)
    with pytest.raises(SurgeryError, match=f"256 tokens: .*{reason}"):
        convert_checkpoint(checkpoints(name), tmp_path / "out", settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["gemma", "gemma3_window"])
def test_a_model_that_sees_later_tokens_is_refused(checkpoints, tmp_path, name):
    source = shutil.copytree(checkpoints(name), tmp_path / "source")
    edit_config(source, use_bidirectional_attention=True)
    with pytest.raises(SurgeryError, match="such a model has no KV cache"):
        convert_checkpoint(source, tmp_path / "out", STRUCTURES["hybrid"]())


def test_layers_that_predict_further_tokens_are_left_out(checkpoints, tmp_path):
    source, names = tmp_path / "source", ("eh_proj.weight", "self_attn.k_proj.weight")
    shutil.copytree(checkpoints("glm4_moe"), source)
    further = {f"model.layers.2.{name}": torch.zeros(4, 4) for name in names}
    save_file(load_file(source / "model.safetensors") | further, source / "model.safetensors")
    edit_config(source, num_nextn_predict_layers=1)
    result = convert_checkpoint(source, tmp_path / "out", STRUCTURES["hybrid"]())
    files = CheckpointReader.open(result.path)
    assert files.config["num_nextn_predict_layers"] == 0 and not further.keys() & set(files.names())
    assert {name for name in CheckpointReader.open(source).names() if ".self_attn." not in name} - further.keys() == {
        name for name in files.names() if ".self_attn." not in name
    }
