"""`--to hybrid`, end to end on tiny models: what was written is the source with streaming heads, and says so."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from loading import run_elsewhere
from safetensors.torch import load_file
from scoring import streaming_heads
from tiny_models import HELD_OUT, tokens
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import measure_kv
from surgery.heads.pattern import HeadPattern
from surgery.model import SurgeryForCausalLM
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.head_order import permute_heads

WEIGHTS_ONLY = {"calibration": "none"}
SINKS, RECENT = 3, 5


@pytest.fixture
def pattern(tmp_path):
    """Writes a pattern of the given scores."""

    def write(scores, sinks=SINKS, recent=RECENT, name="pattern"):
        path = tmp_path / f"{name}.safetensors"
        HeadPattern(torch.tensor(scores, dtype=torch.float32), "needle", sinks, recent).save(path, overwrite=True)
        return str(path)

    return write


def settings_of(heads, **settings):
    return HybridSettings(heads=heads, **WEIGHTS_ONLY, **settings)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "qwen3", "glm4", "olmo2", "smollm3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "llama_bias", "qwen3_moe")),
    ],
)
def test_every_family_streams_the_lowest_heads(checkpoints, pattern, tmp_path, name):
    source = checkpoints(name)
    result = convert_checkpoint(source, tmp_path / "out", settings_of(pattern([[0, 1], [3, 2]]), streaming=0.5))
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    with torch.no_grad(), streaming_heads(plain, torch.tensor([[True, True], [False, False]]), SINKS, RECENT):
        expected = plain(tokens()).logits
    logits, cached, facts = run_elsewhere(result.path, tokens(), tmp_path, trust=True)
    assert facts["class"] == "SurgeryForCausalLM"
    for actual in (logits, cached):
        assert (actual - expected).norm() / expected.norm() < 1e-4
    config = json.loads((result.path / "config.json").read_text())
    assert config["attention_layers"][1] is None
    assert config["attention_layers"][0]["full_heads"] == 0


def test_heads_are_moved_and_can_be_moved_back(checkpoints, pattern, tmp_path):
    source = checkpoints("llama_bias", torch.bfloat16)
    result = convert_checkpoint(source, tmp_path / "out", settings_of(pattern([[0, 1], [3, 2]]), streaming=0.25))
    entry = json.loads((result.path / "config.json").read_text())["attention_layers"][0]
    assert entry["head_order"] == [1, 0] and entry["full_heads"] == 1
    before, after = load_file(source / "model.safetensors"), load_file(result.path / "model.safetensors")
    prefix = "model.layers.0.self_attn."
    moved = {name.removeprefix(prefix): tensor for name, tensor in after.items() if name.startswith(prefix)}
    assert not torch.equal(moved["q_proj.weight"], before[prefix + "q_proj.weight"])
    restored = permute_heads(moved, torch.tensor(entry["head_order"]).argsort().tolist())
    after |= {prefix + name: tensor for name, tensor in restored.items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


@pytest.mark.parametrize(("ratio", "full"), [(0.99, 3), (0.6, 2), (0.2, 0)])
def test_a_ratio_is_counted_in_bytes_at_a_context(checkpoints, pattern, tmp_path, ratio, full):
    settings = settings_of(pattern([[0.1, 0.4], [0.3, 0.2]]), kv_ratio=ratio, context=100)
    report = convert_checkpoint(checkpoints("llama"), tmp_path / "out", settings).report
    entries = (SINKS + RECENT - 1) / 100
    assert report.target["full_heads"] == full
    assert report.target["kv_ratio_at_context"] == pytest.approx((full + (4 - full) * entries) / 4)
    assert report.target["kv_ratio_at_context"] <= ratio
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    source = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    whole = measure_kv(source, 100).held_bytes
    assert measure_kv(model, 100).held_bytes == round(report.target["kv_ratio_at_context"] * whole)


ALL_STREAM = HybridSettings(streaming=1, sinks=SINKS, recent=RECENT, **WEIGHTS_ONLY)


def test_all_heads_stream_without_a_pattern(conversions):
    report = conversions("llama", ALL_STREAM).report
    assert report.target["full_heads"] == 0 and report.target["method"] == "streaming-llm"
    assert all(layer.scores is None and layer.streaming_heads == (0, 1) for layer in report.layers)


def test_losses_and_bytes_are_reported_as_measured(checkpoints, pattern, tmp_path):
    text = {"calibration": str(HELD_OUT), "calibration_length": 64, "calibration_tokens": 256, "held_out": 2}
    settings = HybridSettings(heads=pattern([[0, 1], [3, 2]]), streaming=0.75, **text)
    report = convert_checkpoint(checkpoints("llama"), tmp_path / "out", settings).report
    losses = {row["stage"]: row["loss"] for row in report.ladder}
    assert list(losses) == ["source", "streaming", "reloaded"]
    assert losses["streaming"] == pytest.approx(losses["reloaded"], abs=1e-5)
    assert abs(losses["streaming"] - losses["source"]) > 1e-5
    assert all(layer.measured["streaming"] > 0 for layer in report.layers)
    assert report.target["pattern"]["method"] == "needle"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "3 of 4 KV heads stream over 3 first and 5 recent tokens" in card
    at = report.kv["measured_at_tokens"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert report.kv["measured_bytes_per_token"] * at == measure_kv(model, at).held_bytes


MADE = {
    "gqa": KVHeadsSettings(kv_heads=1, method="mean-pool", **WEIGHTS_ONLY),
    "mla": ConvertSettings(carrier="own", kv_lora_rank=12, rope_dim=4, **WEIGHTS_ONLY),
    "stock mla": ConvertSettings(carrier="stock", kv_lora_rank=12, rope_dim=4, **WEIGHTS_ONLY),
    "low rank": LowRankSettings(rank=12, **WEIGHTS_ONLY),
}


@pytest.fixture
def converted(conversions):
    """Checkpoints converted before."""
    return lambda kind: conversions("llama", MADE[kind]).path


@pytest.mark.parametrize(
    ("kind", "scores"), [("gqa", [[1], [0]]), ("mla", [[1, 0], [0, 0]]), ("low rank", [[0, 1], [0, 0]])]
)
def test_what_was_converted_before(converted, pattern, tmp_path, kind, scores):
    source = converted(kind)
    result = convert_checkpoint(source, tmp_path / "out", settings_of(pattern(scores), kv_ratio=0.7, context=100))
    assert [bool(layer.full_heads) for layer in result.report.layers] == [True, False]
    entries = (SINKS + RECENT - 1) / 100
    assert result.report.target["kv_ratio_at_context"] == pytest.approx((1 + entries) / 2)
    assert isinstance(AutoModelForCausalLM.from_pretrained(result.path), SurgeryForCausalLM)
    assert result.report.previous["target"]["to"] in ("gqa", "mqa", "mla", "lowrank")


def test_latents_of_one_layer_stream_together_or_not_at_all(converted, pattern, tmp_path):
    # Every layer has a head that is worth keeping, so that a budget of less than one layer keeps none.
    settings = settings_of(pattern([[1, 0], [0, 1]]), kv_ratio=0.4, context=100)
    report = convert_checkpoint(converted("mla"), tmp_path / "out", settings).report
    assert report.target["full_heads"] == 0


REFUSED = {
    "no pattern": ("llama", {"heads": None}, "surgery heads"),
    "budget": ("llama", {"kv_ratio": 0.01}, "raise --kv-ratio"),
    "shape": ("llama", {"heads": "other", "streaming": 0.5}, "score this checkpoint"),
    "window unknown": ("llama", {"heads": "bare", "streaming": 0.5}, "--sinks"),
    "nothing to do": ("llama", {"streaming": 0}, "no head streams"),
    "sliding windows": ("mistral_window", {"streaming": 0.5}, "full attention in every layer"),
    "stock MLA": ("stock mla", {"streaming": 0.5}, "no cache"),
}


@pytest.mark.parametrize(("source", "inputs", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_impossible_is_refused_and_leaves_nothing(
    converted, checkpoints, pattern, tmp_path, source, inputs, reason
):
    files = {
        "good": pattern([[0, 1], [3, 2]]),
        "other": pattern([[0, 1]], name="other"),
        "bare": pattern([[0, 1], [3, 2]], None, None, name="bare"),
        None: None,
    }
    settings = settings_of(files[inputs.get("heads", "good")], **{k: v for k, v in inputs.items() if k != "heads"})
    path = converted(source) if "mla" in source else checkpoints(source)
    with pytest.raises(SurgeryError, match=reason):
        convert_checkpoint(path, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_a_hybrid_is_not_made_hybrid_again(conversions, pattern, tmp_path):
    settings = settings_of(pattern([[0, 1], [3, 2]]), streaming=0.5)
    with pytest.raises(SurgeryError, match="has streaming heads already"):
        convert_checkpoint(conversions("llama", ALL_STREAM).path, tmp_path / "two", settings)
