from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.cache_utils import DynamicLayer

from surgery.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes, kv_bytes_per_token

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


def test_a_shared_storage_is_counted_once():
    latent = torch.zeros(1, 1, 10, 8)
    assert cache_bytes([latent, latent]) == latent.nbytes
    assert cache_bytes([latent, latent.view(10, 8)]) == latent.nbytes
    assert cache_bytes([latent.expand(1, 4, 10, 8)]) == latent.nbytes
    assert cache_bytes([latent.expand(1, 4, 10, 8), latent]) == latent.nbytes


def test_a_window_is_counted_as_its_window():
    keys = torch.zeros(1, 2, 100, 8)
    assert cache_bytes([keys[:, :, -10:]]) == keys.nbytes // 10


def test_the_weights_of_modules_are_not_cache():
    assert cache_bytes(SimpleNamespace(keys=torch.zeros(4), owner=nn.Linear(8, 8))) == 16


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_grouped_query_attention(dtype, size):
    growth = kv_bytes_per_token(tiny_llama().to(dtype), prompt_length=12, steps=3)
    assert growth == 3 * 2 * (2 * 8) * size  # layers, K and V, KV heads of 8


def test_latent_attention_caches_only_its_latent():
    config = DeepseekV3Config(
        **TINY, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, first_k_dense_replace=3, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    )  # fmt: skip
    assert kv_bytes_per_token(DeepseekV3ForCausalLM(config), prompt_length=12, steps=3) == 3 * (12 + 4) * 4


def test_a_full_window_does_not_grow():
    config = MistralConfig(**TINY, num_key_value_heads=2, head_dim=8, sliding_window=8)
    model = MistralForCausalLM(config)
    assert kv_bytes_per_token(model, prompt_length=12, steps=3) == 0
    assert kv_bytes_per_token(model, prompt_length=2, steps=3) == 3 * 2 * (2 * 8) * 4


class Caching(nn.Module):
    """Caches four floats a token, and whatever it is told to besides."""

    def __init__(self, **besides):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.besides = besides

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, past_key_values=None, **_):
        if past_key_values is None:
            past_key_values = SimpleNamespace(layers=[DynamicLayer()], **self.besides)
        states = torch.zeros(1, 1, input_ids.shape[1], 2)
        past_key_values.layers[0].update(states, states)
        return SimpleNamespace(past_key_values=past_key_values)


def test_a_cache_class_of_ones_own_is_measured():
    assert kv_bytes_per_token(Caching(), prompt_length=5, steps=2) == 16


def test_what_belongs_to_no_token_is_reported():
    with pytest.raises(SurgeryError, match="holds 312 bytes after 7 tokens but grows by 16 per token"):
        kv_bytes_per_token(Caching(codebook=torch.zeros(50)), prompt_length=5, steps=2)


def test_a_model_without_a_cache_is_refused():
    model = Caching()
    model.forward = lambda **_: SimpleNamespace(past_key_values=None)
    with pytest.raises(SurgeryError, match="Caching returns no cache"):
        kv_bytes_per_token(model)


@pytest.mark.parametrize(("prompt_length", "steps"), [(0, 1), (1, 0)])
def test_impossible_requests(prompt_length, steps):
    with pytest.raises(SurgeryError, match="at least 1 of each"):
        kv_bytes_per_token(Caching(), prompt_length, steps)
