"""Packing, quantisation error and the cache of integers itself."""

import itertools

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache, MistralConfig

from surgery.eval.kv_cache import cache_bytes
from surgery.model.quantized_cache import QuantizedKVCache, dequantize, pack, quantize, quantized_kv_bytes, unpack

bits_cases = pytest.mark.parametrize("bits", [8, 4, 2])


def states(batch=2, heads=3, tokens=70, dim=16, dtype=torch.float32, seed=0):
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@bits_cases
@pytest.mark.parametrize("channels", [1, 5, 32])
def test_codes_are_packed_tightly_and_come_back(bits, channels):
    codes = torch.randint(2**bits, (2, 3, 16, channels), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack(packed, bits), codes)


def test_the_first_token_is_in_the_lowest_bits():
    assert pack(torch.tensor([[1], [2], [3], [0]], dtype=torch.uint8), 2).item() == 0b00_11_10_01


@bits_cases
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step_and_rounding(bits, dim, dtype):
    for size, offset in itertools.product([1e-5, 1e-3, 1.0, 300.0], [0.0, -7.0, 50.0]):
        values = (size * states(4, 4, 16, 16) + offset).to(dtype)
        codes, scale, zero = quantize(values, bits, dim)
        assert scale.dtype == zero.dtype == dtype and int(codes.max()) < 2**bits
        error = (dequantize(codes, scale, zero).double() - values.double()).abs()
        # The stored step is rounded, which moves the last code; the result is rounded to the dtype.
        rounding = torch.finfo(dtype).eps * (scale.double() * (2**bits - 1) + values.double().abs()) + 2**bits * 6e-8
        assert (error <= scale.double() / 2 + rounding).all()


@bits_cases
def test_equal_values_are_exact(bits):
    values = torch.full((1, 1, 8, 4), -3.25, dtype=torch.bfloat16)
    assert torch.equal(dequantize(*quantize(values, bits, -2)), values)


def test_scales_are_of_key_channels_and_of_value_tokens():
    """A channel that is large in all keys costs the others nothing, nor does a token that is large in all values."""
    keys, values = states(tokens=32), states(tokens=32, seed=1)
    cache = QuantizedKVCache(4)
    plain_keys, plain_values = cache.update(keys, values, 0)
    loud_keys, loud_values = keys.clone(), values.clone()
    loud_keys[..., 3] *= 1000
    loud_values[..., 5, :] *= 1000
    new_keys, new_values = QuantizedKVCache(4).update(loud_keys, loud_values, 0)
    others = torch.arange(16) != 3
    assert torch.equal(new_keys[..., others], plain_keys[..., others])
    others = torch.arange(32) != 5
    assert torch.equal(new_values[..., others, :], plain_values[..., others, :])


@bits_cases
@pytest.mark.parametrize("window", [0, 20])
def test_any_chunks_keep_the_same_and_recent_tokens_exactly(bits, window):
    keys, values = states(), states(dim=12, seed=1)
    whole = QuantizedKVCache(bits, 16, window)
    expected = whole.update(keys, values, 0)
    chunked = QuantizedKVCache(bits, 16, window)
    for first, last in [(0, 7), (7, 8), (8, 40), (40, 69), (69, 70)]:
        got = chunked.update(keys[:, :, first:last], values[:, :, first:last], 0)
        assert chunked.get_seq_length() == got[0].shape[2] == last
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    exact = (70 - window) % 16 + window
    assert torch.equal(got[0][:, :, -exact:], keys[:, :, -exact:])
    assert not torch.isclose(got[0][:, :, : 70 - exact], keys[:, :, : 70 - exact], atol=0).all()
    assert cache_bytes(chunked) == cache_bytes(whole)


@bits_cases
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "group", "window", "dims", "dtype"),
    [
        (128, 32, 0, (32, 32), torch.bfloat16),
        (131, 32, 0, (32, 64), torch.float16),
        (131, 32, 40, (80, 80), torch.float32),  # 80 is no multiple of 32: one group a head
        (9, 32, 0, (16, 4), torch.bfloat16),  # nothing quantised yet
    ],
)
def test_bytes_are_those_predicted(bits, batch, tokens, group, window, dims, dtype):
    cache = QuantizedKVCache(bits, group, window)
    for first in range(0, tokens, 50):
        count = min(50, tokens - first)
        for layer in range(2):
            cache.update(states(batch, 3, count, dims[0], dtype), states(batch, 3, count, dims[1], dtype), layer)
    predicted = quantized_kv_bytes(
        bits, group, window, batch=batch, heads=3, tokens=tokens, key_dim=dims[0], value_dim=dims[1], dtype=dtype
    )
    assert cache_bytes(cache) == 2 * predicted
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors_of(cache) if t.numel()}
    assert sum(held.values()) == 2 * predicted, "a view keeps more memory alive than it shows"


def _tensors_of(cache):
    for layer in cache.layers:
        yield from (layer.keys, layer.values)
        for part in (layer.key_codes, layer.value_codes):
            yield from (part.codes, part.scale, part.zero)


def test_bytes_of_a_long_text_in_bfloat16():
    """4 bits and two scales of 16 bits for 32 numbers are 5 bits a number, against 16."""
    size = dict(batch=1, heads=8, tokens=4096, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    plain = 8 * 4096 * 256 * 2
    assert [quantized_kv_bytes(bits, 32, 0, **size) / plain for bits in (8, 4, 2)] == [9 / 16, 5 / 16, 3 / 16]


@bits_cases
def test_rows_are_repeated_reordered_and_selected(bits):
    keys, values = states(), states(seed=1)
    cache = QuantizedKVCache(bits, 16)
    cache.update(keys, values, 0)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    more = states(tokens=30, seed=2)
    got = cache.update(more, more, 0)
    direct = QuantizedKVCache(bits, 16)
    direct.update(keys[[1, 0]], values[[1, 0]], 0)
    expected = direct.update(more, more, 0)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_reset_and_crop():
    cache = QuantizedKVCache(4)
    keys = states()
    expected = cache.update(keys, keys, 0)[0]
    assert cache.get_seq_length() == 70 and cache.get_mask_sizes(5, 0) == (75, 0)
    assert cache.get_max_length() == cache.layers[0].get_max_cache_shape() == -1
    cache.crop(0)
    with pytest.raises(ValueError, match="assisted"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache_bytes(cache) == 0
    assert torch.equal(cache.update(keys, keys, 0)[0], expected)


@pytest.mark.parametrize("arguments", [(3,), (16,), (4, 0), (2, 6), (4, 32, -1)])
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError):
        QuantizedKVCache(*arguments)


def test_a_sliding_window_is_refused():
    QuantizedKVCache(8, config=MistralConfig(sliding_window=None))
    with pytest.raises(ValueError, match="sliding_attention"):
        QuantizedKVCache(8, config=MistralConfig(sliding_window=16))


def test_the_latent_of_stock_deepseek_v3_is_quantised():
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=2,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    tokens = torch.randint(97, (2, 70))
    with torch.no_grad():
        exact = model(tokens, past_key_values=DynamicCache(config=config)).logits
        output = model(tokens, past_key_values=QuantizedKVCache(8, config=config))
    predicted = quantized_kv_bytes(8, 32, 0, batch=2, heads=1, tokens=70, key_dim=24, value_dim=4, dtype=torch.float32)
    assert cache_bytes(output.past_key_values) == 2 * predicted
    difference = (output.logits - exact).norm() / exact.norm()
    assert 0 < difference < 0.02
