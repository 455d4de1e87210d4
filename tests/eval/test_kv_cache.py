from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, SHAPE
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes, forward_with_cache, measure_kv, random_tokens

TINY = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, head_dim=8))


def test_every_element_of_a_real_cache_is_counted():
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(2, 4, 10, 8), torch.zeros(2, 4, 10, 8), layer)
    assert cache_bytes(cache) == 3 * 2 * (2 * 4 * 10 * 8) * 4
    assert cache_bytes(DynamicCache()) == 0


def test_other_tensors_of_a_layer_are_counted_but_not_its_counters():
    layer = SimpleNamespace(
        codes=torch.zeros(10, 8, dtype=torch.int8),
        scales=[torch.zeros(10, dtype=torch.float16)],
        extra={"zero": torch.zeros(5)},
        length=torch.tensor(10),
        name="layer",
    )
    assert cache_bytes(SimpleNamespace(layers=[layer])) == 80 + 20 + 20


def test_storages_and_views_are_counted_once_and_weights_are_not():
    latent = torch.zeros(1, 1, 10, 8)
    assert cache_bytes([latent, latent]) == latent.nbytes
    assert cache_bytes([latent, latent.view(10, 8)]) == latent.nbytes
    assert cache_bytes([latent.expand(1, 4, 10, 8)]) == latent.nbytes
    assert cache_bytes([latent.expand(1, 4, 10, 8), latent]) == latent.nbytes
    keys = torch.zeros(1, 2, 100, 8)
    assert cache_bytes([keys[:, :, -10:]]) == keys.nbytes // 10
    assert cache_bytes(SimpleNamespace(keys=torch.zeros(4), owner=nn.Linear(8, 8))) == 16


class Embedding(nn.Module):
    """A stand-in for a model: the embedding that random tokens are drawn for."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def get_input_embeddings(self):
        return self.embedding


class Caching(Embedding):
    """Caches four floats a token."""

    def forward(self, input_ids, past_key_values=None, **_):
        if past_key_values is None:
            past_key_values = SimpleNamespace(layers=[DynamicLayer()])
        states = torch.zeros(1, 1, input_ids.shape[1], 2)
        past_key_values.layers[0].update(states, states)
        return SimpleNamespace(past_key_values=past_key_values)


@pytest.mark.parametrize("family", FAMILIES)
def test_use_of_every_family(checkpoints, family):
    model = AutoModelForCausalLM.from_pretrained(checkpoints(family))
    head_dim = getattr(model.config, "head_dim", None) or SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    layer = 2 * SHAPE["num_key_value_heads"] * head_dim * 4  # bytes per token
    windows = {"mistral_window": 2, "qwen2_window": 1}.get(family, 0)
    use = measure_kv(model, 100, batch=2)
    # A window of 16 needs 15 tokens before the one that attends.
    assert use.held_bytes == 2 * layer * ((2 - windows) * 100 + windows * 15)
    assert use.bytes_per_token == use.held_bytes / 200
    assert use.growth_per_token == layer * (2 - windows)
    assert (use.context, use.batch, use.dtype) == (100, 2, "float32")


def test_only_the_last_logits_are_made():
    model = tiny_llama().eval()
    tokens = random_tokens(model, 2, 9)
    with torch.no_grad():
        output, _ = forward_with_cache(model, tokens, None)
        torch.testing.assert_close(output.logits, model(tokens).logits[:, -1:])


class Packing(Embedding):
    """Caches four bytes per token, and half of that in groups of 32."""

    def forward(self, input_ids, past_key_values=None, use_cache=True):
        past_key_values = past_key_values or SimpleNamespace(length=0)
        past_key_values.length += input_ids.shape[1]
        fresh = past_key_values.length % 32
        packed = past_key_values.length - fresh
        past_key_values.data = [torch.zeros(packed, dtype=torch.int16), torch.zeros(fresh, dtype=torch.int32)]
        return SimpleNamespace(past_key_values=past_key_values)


@pytest.mark.parametrize(("context", "values"), [(96, 192), (127, 192 + 31 * 4), (128, 256)])
def test_growth_is_taken_over_whole_groups(context, values):
    use = measure_kv(Packing(), context)
    assert (use.held_bytes, use.growth_per_token) == (values, 2)


def test_short_contexts_and_models_without_a_cache():
    assert measure_kv(Caching(), 2) == measure_kv(Caching(), 2, batch=1)
    assert (measure_kv(Caching(), 2).held_bytes, measure_kv(Caching(), 2).growth_per_token) == (32, 16)
    model = Caching()
    model.forward = lambda **_: SimpleNamespace(past_key_values=None)
    with pytest.raises(SurgeryError, match="Caching returns no cache"):
        measure_kv(model, 2)
