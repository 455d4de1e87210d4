"""Packed rows end to end on tiny models: `--to quantized`, and `--bits auto` of MLA, low rank and cascades."""

from dataclasses import replace

import pytest
import torch
from conversions import convert_checkpoint
from tiny_models import HELD_OUT, make_checkpoint
from transformers import AutoModelForCausalLM

from surgery.architectures.lr_multipliers import STEPS_OF_INPUT, lr_multipliers
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.families.attention import CapturedAttention
from surgery.model.parts import entries_of
from surgery.running.source import Source
from surgery.structures import single_layers
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.passing import source_anatomy
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.registry import find_target
from surgery.structures.settings import FIRST_TOKENS
from surgery.training.lr_multipliers import factors_of

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}
AUTO = {**TEXT, "bits": "auto", "kv_ratio": 0.15, "batch_size": 4}
"""Tiny models are in fp32: 8 bits for every channel are a quarter of their bytes."""
MLA, LOW_RANK, HEADS = ConvertSettings(**AUTO), LowRankSettings(**AUTO), QuantizedSettings(**AUTO)
CASCADE = CrossLayerSettings(**AUTO, group_size=2)
INT8, INT4, INT2 = (QuantizedSettings(**TEXT, batch_size=4, bits=bits) for bits in (8, 4, 2))
# Plain, with biases, and with a key norm.
CASES = [(name, settings) for settings in (MLA, LOW_RANK) for name in ("llama", "qwen2", "qwen3")]
CASES += [(name, settings) for settings in (CASCADE, HEADS) for name in ("qwen2", "qwen3")]


def loaded(conversion):
    model = AutoModelForCausalLM.from_pretrained(conversion.path, trust_remote_code=True)
    return model, entries_of(model.config)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_result_computes_and_caches_what_was_promised(name, settings, conversions):
    """Converting verifies logits and the bytes of the live cache."""
    conversion = conversions(name, settings)
    report, (model, entries) = conversion.report, loaded(conversion)
    assert report.target["bits"] == "auto" and report.target["first_tokens"] == FIRST_TOKENS
    rows = [entry.format.row_bytes for entry in entries]
    assert rows == report.target["row_bytes"] == [layer["row_bytes"] for layer in report.to_dict()["layers"]]
    gains = 2 * entries[0].key_gains(model.config) if settings is MLA else 0
    # All that was asked for is spent, but for less than a step of four bytes; a token is 4 bytes per value here.
    budget = 0.15 * report.kv["source_bytes_per_token"]
    assert budget - 4 - len(rows) < sum(rows) + gains * len(rows) <= budget
    cache = model(torch.arange(20)[None] + 5, use_cache=True).past_key_values
    first = FIRST_TOKENS * sum(entry.format.channels for entry in entries) * 4
    assert cache_bytes(cache) == 20 * (sum(rows) + gains * len(rows)) + first
    if settings in (LOW_RANK, CASCADE):
        assert [entry.shared_layers for entry in entries] == report.target["shared_layers"]
        assert any(report.target["shared_layers"]) == (settings is CASCADE)


def test_bits_are_spent_on_the_components_of_single_heads(conversions):
    model, entries = loaded(conversions("qwen2", HEADS))
    expected = [((head,), (head,)) for head in range(model.config.num_key_value_heads)]
    for entry in entries:
        assert [(block.keys, block.values) for block in entry.blocks] == expected


def test_the_same_bits_for_every_value(conversions):
    """All components are kept, 8 bits are near the source, and fewer lose more."""
    errors = []
    for settings in (INT8, INT4, INT2):
        conversion = conversions("qwen2", settings)
        model, entries = loaded(conversion)
        width = 2 * model.config.num_key_value_heads * model.config.hidden_size // model.config.num_attention_heads
        assert {len(entry.format.bits()) for entry in entries} == {width}
        assert {bits for entry in entries for bits in entry.format.bits()} == {settings.bits}
        assert not any(block.keys and block.values for entry in entries for block in entry.blocks)
        errors.append(max(layer.measured["quantized"] for layer in conversion.report.layers))
    assert 0 < errors[0] < 0.05 and errors == sorted(errors)


@pytest.mark.parametrize(("name", "settings"), [("llama", MLA), ("qwen3", LOW_RANK)])
def test_more_bytes_lose_less(name, settings, conversions):
    few, many = (
        sum(layer.measured["quantized"] for layer in conversions(name, replace(settings, kv_ratio=ratio)).report.layers)
        for ratio in (0.08, 0.15)
    )
    assert 0 < many < few


def test_a_cascade_after_a_layer_norm_in_bfloat16(tmp_path):
    """One of as many latents as inputs, whose mean is zero, is rounding of weights and predicts nothing."""
    source = make_checkpoint(tmp_path / "source", "cohere", torch.bfloat16)
    settings = replace(CASCADE, calibration_tokens=256, kv_ratio=0.5)
    verification = convert_checkpoint(source, tmp_path / "out", settings).report.verification
    assert verification["logit_difference_to_simulation"] < 0.25  # what verification allows; it was 1.6


def test_training_moves_what_makes_a_row_in_proportion_to_its_steps(conversions):
    result = conversions("qwen2", MLA)
    model, _ = loaded(result)
    rules = factors_of(lr_multipliers(CheckpointReader.open(str(result.path))), model, "test")
    factors = {name: rules[name].dense(each) for name, each in model.named_parameters() if name in rules}
    for layer in model.model.layers:
        attention, names = layer.self_attn, {id(each): name for name, each in model.named_parameters()}
        steps = attention.quantizer.step / (STEPS_OF_INPUT * model.config.hidden_size)
        makers = [factors[names[id(each)]] for each in (attention.kv_down.weight, attention.kv_down.bias)]
        for each in (makers[0][:, 0], makers[1]):
            assert ((each / steps).log2().abs() <= 0.5 + 1e-6).all()
        assert not any(factors[names[id(each)]].any() for each in (attention.query_up, attention.value_up))


def test_the_loss_of_a_layer_is_the_divergence_of_whole_logits(checkpoints, monkeypatch):
    """Slices of the vocabulary and of the tokens add up; an unchanged layer loses nothing but rounding."""
    monkeypatch.setattr("surgery.running.layer_stream.VOCABULARY_SLICE", 100)
    monkeypatch.setattr(single_layers, "TOKENS_AT_ONCE", 7)
    opened = Source.open(checkpoints("llama"), ConvertSettings(batch_size=2))

    class Louder(CapturedAttention):
        def forward(self, *args, **kwargs):
            output, *rest = super().forward(*args, **kwargs)
            return (3 * output, *rest)

    def attention_of(index, layer):
        return (Louder if index else CapturedAttention)(source_anatomy(opened, index))

    tokens = torch.arange(40).view(2, 20) + 5
    measured = single_layers.single_layer_divergences(opened.stream, tokens, [0, 1], attention_of, 2, lambda: None)
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"))
    source = model(tokens).logits.detach().double().log_softmax(-1)
    model.model.layers[1].self_attn.o_proj.weight.data *= 3
    loud = model(tokens).logits.detach().double().log_softmax(-1)
    assert measured[0] == pytest.approx(0, abs=1e-6)
    assert measured[1] == pytest.approx(float((source.exp() * (source - loud)).sum(-1).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("to", "settings", "name"),
    [
        ("mla", {**AUTO, "kv_lora_rank": 8}, "kv_lora_rank"),
        ("mla", {**AUTO, "rope_dim": 4}, "rope_dim"),
        ("mla", {**AUTO, "method": "transmla"}, "method"),
        ("mla", {**AUTO, "allocate": "uniform"}, "allocate"),
        ("mla", {**AUTO, "calibration": "none"}, "calibration"),
        ("mla", {**AUTO, "carrier": "stock"}, "carrier"),
        ("lowrank", {**TEXT, "bits": "auto", "rank": 8}, "rank"),
        ("lowrank", {**AUTO, "rank_multiple": 2}, "rank_multiple"),
        ("lowrank", {**AUTO, "method": "separate"}, "method"),
        ("lowrank", {**AUTO, "allocate": "uniform"}, "allocate"),
        ("lowrank", {**AUTO, "calibration": "none"}, "calibration"),
        ("lowrank", {**AUTO, "window": 8}, "window"),
        ("quantized", {**TEXT, "bits": 4, "kv_ratio": 0.2}, "kv_ratio"),
        ("quantized", {**TEXT, "bits": 3}, "bits"),
        ("quantized", {"calibration": "none"}, "calibration"),
    ],
)
def test_settings_that_bits_decide_are_refused(to, settings, name):
    with pytest.raises(SurgeryError) as error:
        find_target(to).settings(settings)
    assert error.value.setting == name


@pytest.mark.parametrize(
    ("to", "settings", "name"),
    [
        *(("quantized", {name: 8}, name) for name in ("group", "keys", "hadamard", "rope_bits", "streaming_bits")),
        # Bits of other structures are chosen by the loss or left out.
        *((to, {"bits": 4}, "bits") for to in ("lowrank", "mla", "gqa", "hybrid")),
        ("crosslayer", {"bits": 4}, "bits"),
    ],
)
def test_settings_that_went_name_what_to_use(to, settings, name):
    with pytest.raises(SurgeryError) as error:
        find_target(to).settings(settings)
    assert error.value.setting == name and error.value.hint


@pytest.mark.parametrize(
    ("name", "settings", "setting"),
    [
        ("mistral_window", MLA, "bits"),
        ("llama", replace(MLA, kv_ratio=0.02), "kv_ratio"),
        ("mistral_window", LOW_RANK, "bits"),
        ("llama", replace(LOW_RANK, kv_ratio=0.01), "kv_ratio"),
    ],
)
def test_sources_and_ratios_that_cannot_be(name, settings, setting, conversions):
    with pytest.raises(SurgeryError) as error:
        conversions(name, settings)
    assert error.value.setting == setting


def test_an_engine_quantizes_its_plain_cache_itself():
    def answer(**options):
        return QuantizedSettings.better_alternative({"engine": "llama.cpp", **options}.get)

    assert answer() == answer(bits="auto") == answer(bits="4") and "-ctk q4_0 -ctv q4_0" in answer()
    assert "-ctk q8_0" in answer(bits="8")
    assert "surgery plan CKPT --kv-ratio 0.5 --engine llama.cpp --allow engine" in answer(kv_ratio="0.5")
    assert QuantizedSettings.better_alternative({}.get) is None
