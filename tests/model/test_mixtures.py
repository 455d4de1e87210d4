"""Layers of different kinds, each with a cache of its own form and bits of its own, are one model like any other."""

import pytest
import torch
from own_models import agree, hybrid_entry, low_rank_entry, tiny_source, tokens
from tiny_models import CONFIGS
from transformers import DynamicCache

from surgery.eval.kv_cache import cache_bytes
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.running.layer_stream import single_layer_config

INT4 = {"format": "int4", "group": 4, "window": 0, "keys": "channel"}
INT8 = {"format": "int8", "group": 8, "window": 0, "keys": "token", "sinks": 2}
LATENT = {"kind": "latent", "kv_lora_rank": 12, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": None}
LOW_RANK = low_rank_entry(12)
QUANTIZED = low_rank_entry(12) | {"codes": [["int8", 4], ["int3", 8]]}
HYBRID = hybrid_entry(1, [1, 0], sinks=2, recent=5)
WINDOW = low_rank_entry(12, window=3, sinks=1)
MIXTURES = {
    "latents, heads and the source's": ([LATENT, HYBRID, None, LOW_RANK], None),
    "bits by layer": ([QUANTIZED, None, None, LATENT], [INT4 | {"group": 8, "clip": True}, INT4, None, INT8]),
    "bits next to streams": ([HYBRID, QUANTIZED, None, HYBRID], [None, INT4 | {"group": 8}, INT8, INT8]),
    "a residual window next to others": ([None, WINDOW, LATENT, HYBRID], None),
}
each_mixture = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=list(MIXTURES))


def mixture_model(mixture, family="llama") -> SurgeryForCausalLM:
    entries, kv_cache = mixture
    entries = [
        entry | {"key_norm_eps": 1e-6} if family == "qwen3" and entry and "key_norm_eps" in entry else entry
        for entry in entries
    ]
    source = tiny_source(family, num_hidden_layers=4)
    torch.manual_seed(1)
    return SurgeryForCausalLM(SurgeryConfig.from_base(source.config, entries, kv_cache=kv_cache)).eval()


def one_by_one(model, ids, cache=None, **kwargs):
    cache, logits = cache or DynamicCache(config=model.config), []
    for token in ids.split(1, dim=1):
        out = model(token, past_key_values=cache, **kwargs)
        cache, _ = out.past_key_values, logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize(
    ("mixture", "family"),
    [*((mixture, "llama") for mixture in MIXTURES.values()), (next(iter(MIXTURES.values())), "qwen3")],  # a key norm
    ids=[*MIXTURES, "key norm"],
)
def test_decoding_is_one_pass_and_bytes_are_those_predicted(mixture, family):
    model, ids = mixture_model(mixture, family), tokens(2, 19)
    logits, cache = one_by_one(model, ids)
    assert cache_bytes(cache) == model.kv_cache_bytes(2, 19) == sum(model.kv_layer_bytes(2, 19))
    assert len({type(layer) for layer in cache.layers}) > 1
    again = DynamicCache(config=model.config)
    chunks = [model(part, past_key_values=again) for part in ids.split((7, 1, 11), dim=1)]
    assert cache_bytes(chunks[-1].past_key_values) == cache_bytes(cache)
    if model.config.kv_cache is None:
        agree(model(ids, use_cache=False).logits, logits)
        agree(torch.cat([chunk.logits for chunk in chunks], dim=1), logits)


@each_mixture
def test_left_padding_and_generation(mixture):
    model, ids = mixture_model(mixture), tokens(1, 9)
    padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    if model.config.kv_cache is None:  # groups of tokens that share a scale begin with the padding
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        agree(model(padded, attention_mask=mask, position_ids=position_ids).logits[:, 4:], model(ids).logits)
        alone = model.generate(ids, **how)
        assert torch.equal(model.generate(padded, attention_mask=mask, **how)[:, 13:], alone[:, 9:])
    else:
        assert model.generate(padded, attention_mask=mask, **how).shape == (1, 19)
    assert model.generate(ids, num_beams=3, **how).shape == (1, 15)
    assert model.generate(ids, prefill_chunk_size=4, disable_compile=True, **how).shape == (1, 15)
    with torch.enable_grad():
        model.train()(tokens(), use_cache=False, labels=tokens()).loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "self_attn" in name)


@each_mixture
def test_a_layer_alone_is_that_layer(mixture):
    model = mixture_model(mixture)
    alone = [single_layer_config(model.config, layer) for layer in range(4)]
    sizes = [SurgeryForCausalLM(config).kv_cache_bytes(2, 30) for config in alone]
    assert sizes == model.kv_layer_bytes(2, 30)


@pytest.mark.parametrize(
    ("kv_cache", "message"),
    [
        ([INT4, None], "2 entries, must have 4"),
        ([{"format": "int4"}, None, None, None], "kv_cache has keys"),
        ([None, INT4 | {"format": "int5"}, None, None], "int5"),
    ],
)
def test_what_cannot_be_is_refused(kv_cache, message):
    with pytest.raises(ValueError, match=message):
        mixture_model(([None] * 4, kv_cache))


def test_layers_that_keep_a_state_hold_no_keys_and_values():
    config = CONFIGS["granite4_state"]()
    model = SurgeryForCausalLM(SurgeryConfig.from_base(config, [None] * config.num_hidden_layers))
    values = model.kv_layer_bytes(2, 19)
    assert values[0] == 0 < values[1]
    assert sum(values) == model.kv_cache_bytes(2, 19) > 0
