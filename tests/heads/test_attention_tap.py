"""Standing in for a model's attention: seeing what it sees, and giving what it gives."""

import pytest
import torch
from copying_model import CopyingModel
from tiny_models import FAMILIES, tokens
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.running.attention_tap import AttentionCall, tap_attention


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_as_it_is_gives_the_model(checkpoints, family):
    model, ids = load(checkpoints(family)), tokens()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    expected = model(ids, attention_mask=mask).logits
    calls = []

    def attention(call):
        calls.append((call.layer, tuple(call.query.shape[:3]), tuple(call.key.shape[:3])))
        return call.output()

    before = model.config._attn_implementation
    with tap_attention(model, attention):
        logits = model(ids, attention_mask=mask).logits
    assert torch.allclose(logits[mask.bool()], expected[mask.bool()], atol=1e-4)
    assert calls == [(layer, (2, 4, 40), (2, 2, 40)) for layer in range(2)]
    assert model.config._attn_implementation == before
    assert torch.equal(model(ids, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_tokens_after_a_cache_and_what_the_function_gives(checkpoints):
    model, ids = load(checkpoints("llama")), tokens()
    expected = model(ids).logits
    with tap_attention(model, AttentionCall.output):
        cache = model(ids[:, :25], use_cache=True).past_key_values
        middle = model(ids[:, 25:39], past_key_values=cache).logits
        last = model(ids[:, 39:], past_key_values=cache).logits
    assert torch.allclose(torch.cat((middle, last), 1), expected[:, 25:], atol=1e-4)
    with tap_attention(model, lambda call: torch.zeros_like(call.output())):
        assert not torch.allclose(model(ids).logits, expected, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@torch.no_grad()
def test_heads_apart_are_the_heads_together(checkpoints, family):
    calls = []
    model = load(checkpoints(family))
    with tap_attention(model, lambda call: calls.append(call) or call.output()):
        model(tokens())
    for call in calls:
        apart = torch.cat([call.of_heads(head, head + 1).output() for head in range(call.kv_heads)], dim=2)
        assert torch.allclose(apart, call.output(), atol=1e-5)
        visible = call.visible()[0, 0]
        assert visible.shape == (40, 40)
        assert visible.diagonal().all() and not visible.triu(1).any()
        assert visible[39, 0] == (family == "llama")


@torch.no_grad()
def test_the_tap_goes_after_an_error(checkpoints):
    model, ids = load(checkpoints("llama")), tokens()
    expected = model(ids).logits

    def fails(call):
        raise SurgeryError("no")

    with pytest.raises(SurgeryError, match="no"), tap_attention(model, fails):
        model(ids)
    assert torch.equal(model(ids).logits, expected)
    assert not hasattr(model.base_model.layers[0].self_attn, "surgery_tap")


def test_a_model_without_attention_is_refused():
    with (
        pytest.raises(SurgeryError, match="CopyingModel does not support custom attention functions"),
        tap_attention(CopyingModel(64), id),
    ):
        pass
