"""Packing, quantization error and the cache of integers itself."""

import itertools
from functools import partial

import pytest
import torch
from quantized_caches import quantized_cache
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM, Cache

from surgery.eval.kv_cache import cache_bytes
from surgery.eval.tensor_bytes import plain_tensors
from surgery.model.left_padding import LeftPadding
from surgery.model.quantization import BITS, dequantize, pack, quantize, token_groups, unpack
from surgery.model.quantized_cache import QuantizedKVLayer
from surgery.model.sink_window_cache import SinkWindowCache

bits_cases = pytest.mark.parametrize("bits", [8, 4, 3, 2])
integers = pytest.mark.parametrize("form", ["int8", "int4", "int3", "int2"])
formats = pytest.mark.parametrize("form", list(BITS))


def states(batch=2, heads=3, tokens=70, dim=16, dtype=torch.float32, seed=0):
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


@bits_cases
@pytest.mark.parametrize("channels", [1, 5, 32])
def test_codes_are_packed_tightly_and_come_back(bits, channels):
    codes = torch.randint(2**bits, (2, 3, 16, channels), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack(packed, bits), codes)
    first = pack(torch.tensor([[1], [2], [3], [0]], dtype=torch.uint8), 2).item()
    assert first == 0b00_11_10_01, "the first token is in the lowest bits"


@integers
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step_and_rounding(form, dim, dtype):
    bits = BITS[form]
    for size, offset in itertools.product([1e-5, 1e-3, 1.0, 300.0], [0.0, -7.0, 50.0]):
        values = (size * states(4, 4, 16, 16) + offset).to(dtype)
        codes, scale, zero = quantize(values, form, dim)
        assert scale.dtype == zero.dtype == dtype and int(codes.max()) < 2**bits
        error = (dequantize(codes, scale, zero).double() - values.double()).abs()
        # The stored step is rounded, which moves the last code; the result is rounded to the dtype.
        rounding = torch.finfo(dtype).eps * (scale.double() * (2**bits - 1) + values.double().abs()) + 2**bits * 6e-8
        assert (error <= scale.double() / 2 + rounding).all()


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_keeps_four_significant_bits(dim, dtype):
    for size, offset in itertools.product([1e-2, 1.0, 300.0], [0.0, -7.0]):
        values = (size * states(4, 4, 16, 16) + offset).to(dtype)
        codes, scale, zero = quantize(values, "fp8", dim)
        assert codes.dtype == torch.uint8 and scale.dtype == dtype and zero is None
        decoded = dequantize(codes, scale, zero).double()
        # Half a unit of three mantissa bits, or of the least number of the format; then what the dtype rounds.
        allowed = values.double().abs() * (1 / 16 + 4 * torch.finfo(dtype).eps) + scale.double() * 2**-10
        assert ((decoded - values.double()).abs() <= allowed).all()
        largest = values.double().abs().amax(dim, keepdim=True)
        assert (decoded.abs().amax(dim, keepdim=True) / largest - 1).abs().max() < 0.01, "the range is not used"


@integers
def test_equal_values_are_exact(form):
    values = torch.full((1, 1, 8, 4), -3.25, dtype=torch.bfloat16)
    assert torch.equal(dequantize(*quantize(values, form, -2)), values)


def test_fp8_of_subnormal_scales_and_of_nothing():
    """Scales of tiny float16 numbers are subnormal: their rounding alone takes the greatest number out of the range."""
    values = (4e-5 * torch.linspace(-1, 1, 16)).half().view(1, 1, 16, 1)
    codes, scale, zero = quantize(values, "fp8", -2)
    assert values.abs().max() / scale > 500
    assert (dequantize(codes, scale, zero) - values).abs().max() < values.abs().max()
    assert not dequantize(*quantize(torch.zeros(1, 1, 8, 4), "fp8", -2)).any()


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_scales_are_of_key_channels_and_of_value_tokens(form):
    """A channel that is large in all keys costs the others nothing, nor does a token that is large in all values."""
    keys, values = states(tokens=32), states(tokens=32, seed=1)
    plain_keys, plain_values = quantized_cache(form).update(keys, values, 0)
    loud_keys, loud_values = keys.clone(), values.clone()
    loud_keys[..., 3] *= 1000
    loud_values[..., 5, :] *= 1000
    new_keys, new_values = quantized_cache(form).update(loud_keys, loud_values, 0)
    others = torch.arange(16) != 3
    assert torch.equal(new_keys[..., others], plain_keys[..., others])
    others = torch.arange(32) != 5
    assert torch.equal(new_values[..., others, :], plain_values[..., others, :])


@pytest.mark.parametrize(("width", "groups"), [(0, 0), (4, 1), (32, 1), (33, 2), (80, 3), (97, 4)])
def test_a_token_has_the_fewest_groups(width, groups):
    """Check that a loud first channel is felt in the first group only, as each group is scaled by its own largest
    channel."""
    assert token_groups(width, 32) == groups
    values = states(1, 1, 32, width)
    _, quiet = quantized_cache("int4").update(states(1, 1, 32), values, 0)
    assert quiet.shape == values.shape
    if groups > 1:
        loud = values.clone()
        loud[..., 0] *= 1000
        _, result = quantized_cache("int4").update(states(1, 1, 32), loud, 0)
        same = (result == quiet).all(dim=-2).flatten()
        first = -(-width // groups)
        assert not same[:first].any() and same[first:].all()


@formats
@pytest.mark.parametrize(
    ("keys_by", "window", "value_dim"), [("channel", 20, 12), ("channel", 0, 0), ("token", 20, 12)]
)
def test_any_chunks_keep_the_same_and_recent_tokens_exactly(form, keys_by, window, value_dim):
    keys, values = states(), states(dim=value_dim, seed=1)
    whole = quantized_cache(form, 16, window, keys_by)
    expected = whole.update(keys, values, 0)
    chunked = quantized_cache(form, 16, window, keys_by)
    for first, last in [(0, 7), (7, 8), (8, 40), (40, 69), (69, 70)]:
        result = chunked.update(keys[:, :, first:last], values[:, :, first:last], 0)
        assert chunked.get_seq_length() == result[0].shape[2] == result[1].shape[2] == last
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    assert result[1].shape[-1] == value_dim
    exact = (70 - window) % 16 + window
    assert torch.equal(result[0][:, :, -exact:], keys[:, :, -exact:])
    changed = ~torch.isclose(result[0][:, :, : 70 - exact], keys[:, :, : 70 - exact], atol=0)
    # The least and the greatest of a group's 16 numbers are codes of their own.
    assert changed.float().mean() > 0.8
    assert cache_bytes(chunked) == cache_bytes(whole)


@formats
@pytest.mark.parametrize(("keys_by", "batch"), [("channel", 4), ("token", 1)])
@pytest.mark.parametrize(
    ("tokens", "group", "window", "dims", "dtype"),
    [
        (128, 32, 0, (32, 32), torch.bfloat16),
        (131, 32, 0, (32, 64), torch.float16),
        (131, 32, 40, (80, 80), torch.float32),  # 80 is no multiple of 32
        (131, 16, 0, (88, 0), torch.bfloat16),  # a latent alone
        (9, 32, 0, (16, 4), torch.bfloat16),  # nothing quantized yet
    ],
)
def test_bytes_are_those_predicted(form, keys_by, batch, tokens, group, window, dims, dtype):
    cache = Cache(layers=[QuantizedKVLayer(form, group, window, keys_by) for _ in range(2)])
    for layer in cache.layers:
        layer.reserve(tokens)
    for first in range(0, tokens, 50):
        count = min(50, tokens - first)
        for layer in range(2):
            cache.update(states(batch, 3, count, dims[0], dtype), states(batch, 3, count, dims[1], dtype), layer)
    size = dict(batch=batch, heads=3, key_dim=dims[0], value_dim=dims[1], dtype=dtype)
    predicted = cache.layers[0].predicted_bytes(tokens, **size)
    assert cache_bytes(cache) == 2 * predicted
    values = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors_of(cache) if t.numel()}
    # Of full-precision tokens there are fewer than have memory, until the next group of them is quantized.
    spare = 2 * batch * 3 * (group + window - 1) * sum(dims) * dtype.itemsize
    assert 0 <= sum(values.values()) - 2 * predicted <= spare, "a view keeps more memory alive than it shows"


def _tensors_of(cache):
    for layer in cache.layers:
        yield from (layer.keys, layer.values)
        for part in (layer.key_codes, layer.value_codes):
            yield from (tensor for tensor in (part.codes, part.scale, part.zero) if tensor is not None)


def test_bytes_of_a_long_text_in_bfloat16():
    """4 bits and two scales of 16 bits for 32 numbers are 5 bits a number, against 16; fp8 has one scale."""
    size = dict(batch=1, heads=8, key_dim=128, value_dim=128, dtype=torch.bfloat16)
    layers, plain = map(QuantizedKVLayer, ("int8", "fp8", "int4", "int3", "int2")), 8 * 4096 * 256 * 2
    shares = [layer.predicted_bytes(4096, **size) / plain for layer in layers]
    assert shares == [9 / 16, 8.5 / 16, 5 / 16, 4 / 16, 3 / 16]


CACHES = {form: partial(quantized_cache, form, 16) for form in BITS} | {"window": partial(SinkWindowCache, 3, 6, 1)}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_rows_are_repeated_reordered_and_selected(make):
    (cache, direct), keys, values = (make(), make()), states(), states(seed=1)
    if windowed := isinstance(cache, SinkWindowCache):
        cache.layers[0].padding, direct.layers[0].padding = LeftPadding([0, 5]), LeftPadding([5, 0])
    cache.update(keys, values, 0)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    direct.update(keys[[1, 0]], values[[1, 0]], 0)
    if windowed:
        assert cache.layers[0].padding.tolist() == [5, 0]
        assert torch.equal(*(each.layers[0].visible(2, torch.device("cpu")) for each in (cache, direct)))
    more = states(tokens=30, seed=2)
    assert all(map(torch.equal, cache.update(more, more, 0), direct.update(more, more, 0)))


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_reset_and_crop(form):
    cache = quantized_cache(form)
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


@pytest.mark.parametrize(
    "arguments",
    [("int5",), ("int3", 12), (8,), ("fp16",), ("int4", 0), ("int2", 6), ("int4", 32, -1), ("int4", 32, 0, "head")],
)
def test_impossible_settings_are_refused(arguments):
    with pytest.raises(ValueError):
        QuantizedKVLayer(*arguments)


def test_the_latent_of_stock_deepseek_v3_is_quantized():
    torch.manual_seed(0)
    config = CONFIGS["deepseek_v3"]()
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), torch.randint(3, 4096, (2, 70))
    exact, output = model(tokens).logits, model(tokens, past_key_values=quantized_cache("int8"))
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    size = dict(batch=2, heads=1, key_dim=latent, value_dim=rope, dtype=torch.float32)
    predicted = QuantizedKVLayer("int8").predicted_bytes(70, **size)
    assert cache_bytes(output.past_key_values) == config.num_hidden_layers * predicted
    difference = (output.logits - exact).norm() / exact.norm()
    assert 0 < difference < 0.02


SPANS = (("int8", 5), ("int4", 4), ("int3", 3), ("int2", 4))


@pytest.mark.parametrize("more", [{"value_format": "exact"}, {"sinks": 3, "spans": SPANS, "window": 9}])
def test_caches_of_several_formats(more, keys="token"):
    """Compare with caches of one format, of the same tokens and channels; bytes are those predicted."""
    layer = QuantizedKVLayer("int4", 16, keys=keys, **more)
    tokens, size = 70, {"batch": 2, "heads": 3, "key_dim": 16, "value_dim": 16, "dtype": torch.float32}
    whole, values = states(tokens=tokens), states(tokens=tokens, seed=1)
    for first, last in ((0, 2), (2, 40), (40, tokens)):
        read = layer.update(whole[..., first:last, :], values[..., first:last, :])
        entries = sum(tensor.nbytes for tensor in plain_tensors(layer))
        assert entries == layer.predicted_bytes(last, **size) and layer.get_seq_length() == last

    sinks, window = more.get("sinks", 0), more.get("window", 0)

    def alone(format, keys, states):
        if format == "exact":
            return states
        single = QuantizedKVLayer(format, 16, window, keys=keys)
        return torch.cat([states[..., :sinks, :], single.update(states[..., sinks:, :], states[..., :0])[0]], dim=-2)

    spans = more.get("spans", (("int4", 16),))
    parts = whole.split([width for _, width in spans], dim=-1)
    expected = [alone(form, keys, part) for (form, _), part in zip(spans, parts, strict=True)]
    torch.testing.assert_close(read[0], torch.cat(expected, dim=-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(read[1], alone(more.get("value_format", "int4"), "token", values), rtol=0, atol=1e-6)
    layer.reorder_cache(torch.tensor([1, 0]))
    again = layer.update(whole[..., :0, :], values[..., :0, :])
    assert all(torch.equal(new, old[[1, 0]]) for new, old in zip(again, read, strict=True))
    layer.reset()
    assert layer.get_seq_length() == 0


@integers
@pytest.mark.parametrize("dim", [-1, -2])
def test_a_clipped_range_leaves_no_group_a_larger_error(form, dim):
    values = states(2, 2, 64, 64)
    values[..., 0, 0] = 30.0  # an outlier, which no range should give up

    def error(clip):
        codes, scale, zero = quantize(values, form, dim, clip=clip)
        assert int(codes.max()) < 2 ** BITS[form]
        return (dequantize(codes, scale, zero) - values).square().sum(dim)

    plain, clipped = error(False), error(True)
    assert (clipped <= plain * (1 + 1e-5)).all()
    assert form != "int2" or clipped.sum() < 0.75 * plain.sum()
