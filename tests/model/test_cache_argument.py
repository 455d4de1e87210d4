"""The name under which caches are handed on, which transformers 5.24 changed."""

import own_models as own
import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from surgery.model.cache_argument import CACHE, CACHE_NAMES, cache_for, returned_cache, takes_cache

MODELS = {name: own.KINDS[name] for name in ("latent", "low_rank", "window", "hybrid", "streaming_latent")}


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_the_custom_class_takes_a_cache_by_either_name(make, name):
    model, tokens, caches = make(own.tiny_source("llama")), own.tokens(), [DynamicCache(), DynamicCache()]
    for piece in tokens.split((8, 4), dim=1):
        outputs = [model(piece, **{CACHE: caches[0]}), model(piece, **{name: caches[1]})]
    assert torch.equal(outputs[1].logits, outputs[0].logits)
    own.agree(outputs[1].logits, model(tokens).logits[:, -4:])
    assert returned_cache(outputs[1]) is caches[1]
    assert caches[1].get_seq_length() == 12


# Of a decoder's own code before 5.24 the new name is not asked.
@pytest.mark.parametrize("name", CACHE_NAMES[CACHE_NAMES.index(CACHE) :])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_so_does_its_decoder(make, name):
    model, tokens, cache = make(own.tiny_source("llama")), own.tokens(), DynamicCache()
    for piece in tokens.split((8, 4), dim=1):
        states = model.model(piece, use_cache=True, **{name: cache}).last_hidden_state
    own.agree(states, model.model(tokens).last_hidden_state[:, -4:])


class Remote(nn.Module):
    """A model of a time before the new name."""

    def forward(self, input_ids, past_key_values=None, **kwargs):
        return CausalLMOutputWithPast(logits=input_ids, past_key_values=past_key_values)


class Either(nn.Module):
    @takes_cache
    def forward(self, input_ids, cache=None):
        return CausalLMOutputWithPast(logits=input_ids, **{CACHE: cache})


@pytest.mark.parametrize("model", [Remote(), Either()], ids=["remote code", "own"])
def test_a_model_gets_its_cache_by_the_name_it_has(model):
    cache = DynamicCache()
    assert returned_cache(model(own.tokens(), **cache_for(model, cache))) is cache


def test_a_model_that_says_no_name_gets_it_by_that_of_transformers():
    assert list(cache_for(nn.Identity(), None)) == [CACHE]
