"""Heads that a prompt of an MLA layer in bits expands: the scores and values of the absorbed form."""

import pytest
import torch
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.model.head_pairs import HeadPairs
from surgery.model.quantized_latent_attention import QuantizedLatentAttention
from surgery.structures.mla.settings import ConvertSettings

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}
AUTO = ConvertSettings(**TEXT, bits="auto", kv_ratio=0.15, batch_size=4)
IDS = torch.arange(80).view(2, 40) % 50 + 5


def _model(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float64, **options).eval()


def _layers(model):
    return [module for module in model.modules() if isinstance(module, QuantizedLatentAttention)]


def _logits(model, absorbed, monkeypatch, mask=None, ids=IDS):
    with monkeypatch.context() as patch, torch.no_grad():
        if absorbed:
            patch.setattr(QuantizedLatentAttention, "_expanded_heads", lambda module, num_tokens: None)
        return model(ids, attention_mask=mask).logits


@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa"), ("glm", "sdpa")]
)
def test_logits_are_those_of_the_absorbed_form(name, attention, conversions, monkeypatch):
    """Also with gains of a key norm, and with channels that do not rotate."""
    model = _model(conversions(name, AUTO).path, attn_implementation=attention)
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    expanded, absorbed = (_logits(model, each, monkeypatch, mask) for each in (False, True))
    layers = _layers(model)
    assert layers and all(layer.expansion[1] is not None for layer in layers)
    assert {layer.expansion[1].heads for layer in layers} == {model.config.num_key_value_heads}
    visible = mask.bool()
    assert (expanded - absorbed)[visible].abs().max() < 1e-9 * absorbed.abs().max()


def test_gradients_are_those_of_the_absorbed_form(conversions, monkeypatch):
    model = _model(conversions("llama", AUTO).path)
    for layer in _layers(model):
        layer.query_up.requires_grad_(False)
        layer.value_up.requires_grad_(False)
    attention = _layers(model)[0]
    gradients = []
    with torch.enable_grad():
        for absorbed in (False, True):
            if absorbed:
                monkeypatch.setattr(QuantizedLatentAttention, "_expanded_heads", lambda module, num_tokens: None)
            loss = model(IDS, labels=IDS).loss
            gradients.append(torch.autograd.grad(loss, [attention.q_proj.weight, attention.kv_down.weight]))
    assert attention.expansion[1] is not None
    for expanded, absorbed in zip(*gradients, strict=True):
        assert absorbed.abs().max() > 0
        assert (expanded - absorbed).abs().max() < 1e-9 * absorbed.abs().max()


def test_weights_of_each_query_head_are_expanded_apart(conversions, monkeypatch):
    model = _model(conversions("llama", AUTO).path)
    with torch.no_grad():
        for layer in _layers(model):
            layer.value_up.add_(torch.randn(layer.value_up.shape, generator=torch.Generator().manual_seed(0)) / 10)
    expanded, absorbed = (_logits(model, each, monkeypatch) for each in (False, True))
    assert {layer.expansion[1].heads for layer in _layers(model)} == {model.config.num_attention_heads}
    assert (expanded - absorbed).abs().max() < 1e-9 * absorbed.abs().max()


def test_weights_that_do_not_commute_with_the_rotation_are_absorbed(conversions):
    """Also weights that changed after a prompt had expanded them."""
    model = _model(conversions("llama", AUTO).path)
    layer = _layers(model)[0]
    with torch.no_grad():
        assert layer._expanded_heads(40) is not None
        layer.query_up[0, 0, -1] += 0.5
        assert layer._expanded_heads(40) is None
        assert layer._expanded_heads(layer.head_dim - 1) is None
    with torch.enable_grad():
        assert _layers(model)[1]._expanded_heads(40) is None, "training reaches every element of query_up"


@pytest.mark.parametrize("orientation", [1, -1])
def test_pairs_are_found_in_either_order(orientation):
    """Channels 0 and 2 rotate at one frequency, 1 and 3 at another, 4 does not."""
    factors = torch.randn(2, 2, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    query_up = torch.zeros(2, 5, 2 + 10, dtype=torch.float64)
    for pair, components in enumerate(([0, 1, 2], [3, 4])):
        for index, component in enumerate(components):
            factor = factors[:, pair, index]
            for channel, turned in ((pair, factor), (pair + 2, 1j * orientation * factor)):
                query_up[:, channel, 2 + 2 * component : 4 + 2 * component] = torch.view_as_real(turned)
    query_up[:, 4, :2] = 1
    value_up = torch.randn(2, 5, 2, dtype=torch.float64)
    heads = HeadPairs.of(query_up, value_up, 2, 1, [7, 7, 7, 9, 9])
    assert heads.channels.tolist() == ([0, 2, 1, 3, 4] if orientation == 1 else [2, 0, 3, 1, 4])
    assert heads.pairs.tolist() == [0, 3]
    assert HeadPairs.of(query_up, value_up, 2, 1, [7, 7, 8, 9, 9]) is None
