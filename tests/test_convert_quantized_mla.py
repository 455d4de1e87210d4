"""`--to mla --bits auto` end to end on tiny models: bytes are those asked for, and the model is the one simulated."""

import pytest
import torch
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.architectures.lr_multipliers import STEPS_OF_INPUT, lr_multipliers
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.families.attention import CapturedAttention
from surgery.model.parts import entries_of
from surgery.running.source import Source
from surgery.structures import single_layers
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.passing import source_anatomy
from surgery.structures.settings import FIRST_TOKENS
from surgery.training.lr_multipliers import factors_of

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}
AUTO = {**TEXT, "bits": "auto", "kv_ratio": 0.15, "batch_size": 4}
"""Tiny models are in fp32: 8 bits for every channel are a quarter of their bytes."""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_result_computes_and_caches_what_was_promised(name, conversions):
    """Plain, with biases, and with a key norm. Converting verifies logits and the bytes of the live cache."""
    conversion = conversions(name, ConvertSettings(**AUTO))
    report = conversion.report
    assert report.target["bits"] == "auto" and report.target["first_tokens"] == FIRST_TOKENS
    model = AutoModelForCausalLM.from_pretrained(conversion.path, trust_remote_code=True)
    entries = entries_of(model.config)
    rows = [entry.format.row_bytes for entry in entries]
    assert rows == report.target["row_bytes"] == [layer["row_bytes"] for layer in report.to_dict()["layers"]]
    gains = 2 * entries[0].key_gains(model.config)
    # All that was asked for is spent, but for less than a step of four bytes; a token is 4 bytes per value here.
    budget = 0.15 * report.kv["source_bytes_per_token"]
    assert budget - 4 - len(rows) < sum(rows) + gains * len(rows) <= budget
    ids = torch.arange(20)[None] + 5
    cache = model(ids, use_cache=True).past_key_values
    first = FIRST_TOKENS * sum(entry.format.channels for entry in entries) * 4
    assert cache_bytes(cache) == 20 * (sum(rows) + gains * len(rows)) + first


def test_training_moves_what_makes_a_row_in_proportion_to_its_steps(conversions):
    result = conversions("qwen2", ConvertSettings(**AUTO))
    model = AutoModelForCausalLM.from_pretrained(result.path, trust_remote_code=True)
    rules = lr_multipliers(CheckpointReader.open(str(result.path)))
    factors = factors_of(rules, model, "test")
    for layer in model.model.layers:
        attention, names = layer.self_attn, {id(each): name for name, each in model.named_parameters()}
        steps = attention.quantizer.step / (STEPS_OF_INPUT * model.config.hidden_size)
        makers = [factors[names[id(each)]] for each in (attention.kv_down.weight, attention.kv_down.bias)]
        for each in (makers[0][:, 0], makers[1]):
            assert ((each / steps).log2().abs() <= 0.5 + 1e-6).all()
        assert not any(factors[names[id(each)]].any() for each in (attention.query_up, attention.value_up))


def test_more_bytes_lose_less(conversions):
    few, many = (
        sum(layer.measured["quantized"] for layer in conversions("llama", ConvertSettings(**settings)).report.layers)
        for settings in ({**AUTO, "kv_ratio": 0.08}, AUTO)
    )
    assert 0 < many < few


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv_lora_rank": 8}, "kv_lora_rank"),
        ({"rope_dim": 4}, "rope_dim"),
        ({"method": "transmla"}, "method"),
        ({"allocate": "uniform"}, "allocate"),
        ({"calibration": "none"}, "calibration"),
        ({"carrier": "stock"}, "carrier"),
    ],
)
def test_settings_that_bits_decide_are_refused(settings, name):
    with pytest.raises(SurgeryError) as error:
        ConvertSettings(**{**AUTO, **settings})
    assert error.value.setting == name


@pytest.mark.parametrize(("name", "ratio", "setting"), [("mistral_window", 0.15, "bits"), ("llama", 0.02, "kv_ratio")])
def test_sources_and_ratios_that_cannot_be(name, ratio, setting, conversions):
    with pytest.raises(SurgeryError) as error:
        conversions(name, ConvertSettings(**{**AUTO, "kv_ratio": ratio}))
    assert error.value.setting == setting


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
