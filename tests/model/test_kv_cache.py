"""Models of the custom model class that keep their cache quantized: whoever calls them, and however, reads it."""

import pytest
import torch
from own_models import LAYERS, agree, decode, lossless_low_rank, lossless_model, tiny_source, tokens
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.logits import LogitReader
from surgery.eval.variants.quantized_kv import quantize_kv
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.quantized_cache import QuantizedKVLayer

INT4 = {"format": "int4", "group": 4, "window": 0, "keys": "channel"}
INT8, WINDOW = INT4 | {"format": "int8"}, INT4 | {"window": 3}


def plain(**overrides) -> SurgeryForCausalLM:
    """A llama in the custom model class, its attention as it was."""
    source = tiny_source("llama")
    model = SurgeryForCausalLM(SurgeryConfig.from_base(source.config, [None] * LAYERS, **overrides))
    model.load_state_dict(source.state_dict(), strict=True)
    return model.eval()


MODELS = {
    "plain": plain,
    "latent": lambda **overrides: lossless_model(tiny_source("llama"), **overrides),
    "latent, key norm": lambda **overrides: lossless_model(tiny_source("qwen3"), **overrides),
    "low rank": lambda **overrides: lossless_low_rank(tiny_source("llama"), **overrides),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))


@each_model
@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_decoding_is_a_cache_given_by_hand(make, form):
    keys = "channel"
    by_hand = Cache(layers=[QuantizedKVLayer(form, 4, 3, keys) for _ in range(LAYERS)])
    expected = decode(make(), by_hand)
    model = make(kv_cache=WINDOW | {"format": form})
    mine = DynamicCache(config=model.config)
    assert torch.equal(decode(model, mine), expected)
    assert all(type(layer) is QuantizedKVLayer and layer.get_seq_length() == 12 for layer in mine.layers)
    assert cache_bytes(mine) == cache_bytes(by_hand) == model.kv_cache_bytes(2, 12)
    assert not torch.equal(expected, make()(tokens()).logits)


@each_model
def test_without_a_cache_attention_reads_what_one_would_give(make):
    model, exact = make(kv_cache=INT4), make()(tokens()).logits
    cached = model(tokens())
    alone = model(tokens(), use_cache=False)
    assert torch.equal(alone.logits, cached.logits) and (cached.logits - exact).abs().max() > 0.01
    assert alone.past_key_values is None and cached.past_key_values.get_seq_length() == 12
    body = model.base_model(input_ids=tokens(), use_cache=False)
    assert torch.equal(model.lm_head(body.last_hidden_state), cached.logits)
    # What evaluations read: the decoder alone, tried on a few tokens first.
    reader = LogitReader(model, tokens())
    agree(reader.logits(reader.states(tokens())), cached.logits)


@each_model
def test_caches_of_others_are_refused(make):
    model = make(kv_cache=INT4)
    filled = make()(tokens()).past_key_values
    other = make(kv_cache=WINDOW)(tokens()).past_key_values
    for cache in (filled, other, StaticCache(config=model.config, max_cache_len=32)):
        with pytest.raises(ValueError, match="cannot continue"):
            model(tokens(), past_key_values=cache)
    with pytest.raises(SurgeryError, match="of its own"):
        quantize_kv(model, "int8")


def test_layers_with_a_window_are_refused():
    with pytest.raises(ValueError, match="sliding_attention"):
        lossless_model(tiny_source("qwen2"), kv_cache=INT4)
