"""`--to quantized`, end to end on tiny models: what was written is the source with a quantized cache, and says so."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from own_models import low_rank_entry
from safetensors.torch import load_file
from tiny_models import CONFIGS, DEMO, HELD_OUT, tokens
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache

from surgery.architectures.cached import rotated_tensors
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized import stage
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.registry import find_target

QUICK = {"calibration_tokens": 256, "calibration_length": 64, "held_out": 2, "calibration": str(HELD_OUT)}
WEIGHTS_ONLY = {"calibration": "none", "group": 16}


@pytest.fixture
def mla(conversions):
    """An MLA checkpoint of the custom model class, with biases or the exact key norm."""
    settings = ConvertSettings(calibration="none", carrier="own", kv_lora_rank=12, rope_dim=4)
    return lambda name: conversions(name, settings).path


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])  # biases; norms and experts
def test_every_family_keeps_its_weights_and_quantizes_its_cache(checkpoints, tmp_path, name):
    source = checkpoints(name, torch.bfloat16)
    result = convert_checkpoint(source, tmp_path / "out", QuantizedSettings(**WEIGHTS_ONLY))
    before, after = load_file(source / "model.safetensors"), load_file(result.path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)

    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    assert isinstance(model, SurgeryForCausalLM) and model.config.base_model_type == plain.config.model_type
    by_hand = Cache(layers=[QuantizedKVLayer("int4", 16) for _ in range(2)])
    with torch.no_grad():
        output = model(tokens())
        assert torch.equal(output.logits, plain(tokens(), past_key_values=by_hand).logits)
    head_dim = plain.model.layers[0].self_attn.head_dim
    size = dict(heads=2, key_dim=head_dim, value_dim=head_dim, dtype=torch.bfloat16)
    layer = QuantizedKVLayer("int4", 16)
    assert cache_bytes(output.past_key_values) == 2 * layer.predicted_bytes(40, batch=2, **size)

    kv = result.report.kv
    at = kv["measured_at_tokens"]
    expected = 2 * layer.predicted_bytes(at, batch=1, **size) / at
    assert kv["measured_bytes_per_token"] == kv["predicted_bytes_per_token"] == expected
    assert kv["source_bytes_per_token"] == 2 * 2 * 2 * head_dim * 2


@pytest.mark.parametrize("bits", ["fp8", 2])
def test_losses_are_read_through_the_cache(checkpoints, tmp_path, bits):
    settings = QuantizedSettings(bits=bits, group=16, window=4, **QUICK)
    report = convert_checkpoint(checkpoints("llama"), tmp_path / "out", settings).report
    losses = {row["stage"]: row["loss"] for row in report.ladder}
    assert list(losses) == ["source", "quantized", "reloaded"]
    assert losses["quantized"] == pytest.approx(losses["reloaded"], abs=1e-6)
    assert abs(losses["quantized"] - losses["source"]) > 1e-5
    errors = [layer.measured["quantized"] for layer in report.layers]
    assert all(0 < error < (1 if bits == 2 else 0.1) for error in errors)
    assert report.previous is None
    conversion_report = json.loads((tmp_path / "out" / "surgery_report.json").read_text())
    assert conversion_report["target"]["kv_cache"] == {
        "format": settings.format,
        "group": 16,
        "window": 4,
        "keys": "channel",
    }
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{settings.format} in groups of 16, the last 4 tokens exact" in card


@pytest.mark.parametrize("name", ["llama_bias", "qwen3"])
def test_a_rotation_changes_the_cache_and_nothing_else(checkpoints, tmp_path, name):
    settings = QuantizedSettings(bits=8, hadamard=True, **WEIGHTS_ONLY)
    result = convert_checkpoint(checkpoints(name), tmp_path / "out", settings)
    before = load_file(checkpoints(name) / "model.safetensors")
    after = load_file(result.path / "model.safetensors")
    changed = {key.rpartition("self_attn.")[2] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"v_proj.weight", "o_proj.weight"} | ({"v_proj.bias"} if name == "llama_bias" else set())
    assert [row["stage"] for row in result.report.ladder] == ["source", "hadamard", "quantized", "reloaded"]
    config = AutoConfig.from_pretrained(result.path)
    config.kv_cache = None
    exact = AutoModelForCausalLM.from_pretrained(result.path, config=config)(tokens()).logits
    source = AutoModelForCausalLM.from_pretrained(checkpoints(name))(tokens()).logits
    torch.testing.assert_close(exact, source, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "hadamard"),
    [
        ("llama_bias", False),
        ("qwen3", True),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("llama_bias", True), ("qwen3", False))),
    ],
)
def test_an_mla_checkpoint(mla, tmp_path, name, hadamard):
    source = mla(name)
    result = convert_checkpoint(source, tmp_path / "out", QuantizedSettings(hadamard=hadamard, **WEIGHTS_ONLY))
    report = result.report
    assert report.previous["target"]["to"] == "mla" and report.source["model_type"] == "surgery"
    assert report.kv["source_bytes_per_token"] == report.previous["kv"]["measured_bytes_per_token"]
    assert [layer.keys_by for layer in report.layers] == ["channel", "channel"]
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    with torch.no_grad():
        if hadamard:
            torch.testing.assert_close(model.train()(tokens()).logits, plain(tokens()).logits, rtol=1e-3, atol=1e-3)
        else:
            by_hand = Cache(layers=[QuantizedKVLayer("int4", 16) for _ in range(2)])
            assert torch.equal(model(tokens()).logits, plain(tokens(), past_key_values=by_hand).logits)


def test_a_latent_is_rotated_exactly(mla):
    """Rotate in float64, whatever the file's dtype rounds: scores and outputs of the latent are those of before."""
    reader = CheckpointReader.open(mla("llama_bias"))
    config = AutoConfig.from_pretrained(reader.path)
    prefix = "model.layers.1.self_attn."
    after = {name.removeprefix(prefix): tensor.double() for name, tensor in rotated_tensors(reader, config, 1).items()}
    before = {name: reader.tensor(prefix + name).double() for name in after}
    assert after.keys() == {"kv_down.weight", "kv_down.bias", "query_up", "value_up"}

    def products(tensors):
        down = torch.cat([tensors["kv_down.weight"], tensors["kv_down.bias"][:, None]], dim=1)
        return tensors["query_up"] @ down, tensors["value_up"] @ down[:12]

    for new, old in zip(products(after), products(before), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4 * float(old.abs().max()))
    assert torch.equal(after["kv_down.weight"][12:], before["kv_down.weight"][12:])
    assert not torch.allclose(after["kv_down.weight"][:12], before["kv_down.weight"][:12])


@pytest.mark.parametrize("hadamard", [False, True])
def test_layers_that_read_earlier_latents_run_together(tmp_path, hadamard):
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 3
    ranks = (6, 5, 12)
    shared = ((0, 0), (1, 6), (0, 0))
    entries = [
        low_rank_entry(rank, shared_layers=layers, shared_rank=numbers)
        for rank, (layers, numbers) in zip(ranks, shared, strict=True)
    ]
    torch.manual_seed(0)
    SurgeryForCausalLM(SurgeryConfig.from_base(config, entries)).save_pretrained(tmp_path / "source")
    settings = QuantizedSettings(hadamard=hadamard, **WEIGHTS_ONLY)
    report = convert_checkpoint(tmp_path / "source", tmp_path / "out", settings).report
    assert [layer.layer for layer in report.layers] == [0, 2]
    assert report.kv["source_bytes_per_token"] == 4 * sum(ranks)


def test_what_cannot_be_quantized_is_refused(checkpoints, tmp_path):
    quantized = convert_checkpoint(checkpoints("llama"), tmp_path / "once", QuantizedSettings(**WEIGHTS_ONLY)).path
    refused = ((quantized, "quantized already"), (checkpoints("mistral_window"), "sliding_attention"))
    for source, message in refused:
        with pytest.raises(SurgeryError, match=message):
            convert_checkpoint(source, tmp_path / "out", QuantizedSettings(**WEIGHTS_ONLY))
    with pytest.raises(SurgeryError, match="--overwrite"):
        convert_checkpoint(checkpoints("llama"), quantized, QuantizedSettings(**WEIGHTS_ONLY))
    assert not (tmp_path / "out").exists()


def test_other_bytes_than_predicted_leave_nothing(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(QuantizedKVLayer, "predicted_bytes", lambda self, tokens, **size: 1)
    with pytest.raises(SurgeryError, match="where 2 were predicted"):
        convert_checkpoint(checkpoints("llama"), tmp_path / "out", QuantizedSettings(**WEIGHTS_ONLY))
    assert not (tmp_path / "out").exists()


def test_a_rotation_that_is_not_undone_is_caught(checkpoints, tmp_path, monkeypatch):
    def half(reader, config, layer):
        result = rotated_tensors(reader, config, layer)
        return {name: reader.tensor(name) if "v_proj" in name else tensor for name, tensor in result.items()}

    monkeypatch.setattr(stage, "rotated_tensors", half)
    with pytest.raises(SurgeryError, match="logits as written differ from the simulation"):
        convert_checkpoint(checkpoints("llama"), tmp_path / "out", QuantizedSettings(hadamard=True, **WEIGHTS_ONLY))


def test_settings():
    target = find_target("quantized")
    assert target.settings({"bits": "fp8"}).format == "fp8" and target.settings({"bits": "2"}).format == "int2"
    assert QuantizedSettings.from_file(DEMO.parents[2] / "configs" / "quantized.yaml") == QuantizedSettings()
    for wrong in ({"bits": 5}, {"kv_ratio": 0.5}, {"window": -1}, {"keys": "head"}, {"group": 3}, {"group": 0}):
        with pytest.raises(SurgeryError):
            target.settings(wrong)


LOW_RANK = {
    "one latent": {"method": "fisher", "rank": 24},
    "a latent for keys and one for values, and a window": {"method": "cskv", "rank": 24, "window": 5, "sinks": 2},
}


@pytest.mark.parametrize(
    ("low_rank", "hadamard"),
    [
        pytest.param(settings, hadamard, marks=[pytest.mark.slow] * (hadamard == (place == 0)), id=f"{name}-{hadamard}")
        for place, (name, settings) in enumerate(LOW_RANK.items())
        for hadamard in (False, True)
    ],
)
def test_a_low_rank_checkpoint(checkpoints, tmp_path, low_rank, hadamard):
    settings = LowRankSettings(calibration="none", **low_rank)
    source = convert_checkpoint(checkpoints("llama_bias"), tmp_path / "low-rank", settings).path
    result = convert_checkpoint(source, tmp_path / "out", QuantizedSettings(hadamard=hadamard, **WEIGHTS_ONLY))
    assert result.report.previous["target"]["to"] == "lowrank"
    plain = AutoModelForCausalLM.from_pretrained(source).eval()
    config = AutoConfig.from_pretrained(result.path)
    config.kv_cache = None
    exact = AutoModelForCausalLM.from_pretrained(result.path, config=config).eval()
    model = AutoModelForCausalLM.from_pretrained(result.path).eval()
    with torch.no_grad():
        expected = plain(tokens()).logits
        torch.testing.assert_close(exact(tokens()).logits, expected, rtol=1e-3, atol=1e-3)
        output = model(tokens())
    assert 1e-3 < (output.logits - expected).norm() / expected.norm() < 0.5
    assert cache_bytes(output.past_key_values) == model.kv_cache_bytes(2, 40) < plain.kv_cache_bytes(2, 40)
    after, before = (load_file(path / "model.safetensors") for path in (result.path, source))
    changed = {name.rpartition("self_attn.")[2].partition(".")[0] for name in after if name not in before}
    changed |= {n.rpartition("self_attn.")[2].partition(".")[0] for n in after if not torch.equal(after[n], before[n])}
    assert changed == ({"kv_down", "key_up", "value_up"} if hadamard else set())
