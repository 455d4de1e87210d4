"""Grouped-query decoding over codes: the kernel is its reference in float64, which reads the codes of the cache."""

import pytest
import torch
from kernel_checks import EPSILON, assert_close, counts, only_kernels, relative_error
from kernel_examples import Compiled, Example, any_kind, coded, ints, normal, slow, zeros

from surgery.kernels.gqa_decode.operator import gqa_decode
from surgery.kernels.gqa_decode.reference import grouped_query_attention
from surgery.kernels.gqa_decode_quantized.operator import _quantized, gqa_decode_quantized
from surgery.kernels.gqa_decode_quantized.reference import quantized_attention
from surgery.kernels.merge_parts import merge_parts
from surgery.model.quantized_cache import GroupedCodes, QuantizedKVLayer


def quantized(tokens, format, group, by_channel, capacity=None):
    """Codes, scale and zero of tokens [B, G, S, d], with strides of a larger cache and anything after the tokens."""
    codes = GroupedCodes(tokens, format, group, by_channel=by_channel)
    codes.append(tokens)
    return tuple(
        None if tensor is None else roomy(tensor, fill)
        for tensor, fill in ((codes.codes, 255), (codes.scale, float("nan")), (codes.zero, float("nan")))
    )


def roomy(tensor, fill):
    """The tensor as a view of one that has more tokens, filled."""
    larger = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3]), fill)
    larger[:, :, : tensor.shape[2]] = tensor
    return larger[:, :, : tensor.shape[2]]


def inputs(rows, tokens, heads, groups, d, v, coded, settings, dtype, device, seed=0):
    """Queries, and keys and values as codes; keys have channels that are large in every token."""
    format, group, keys = settings
    rng = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, tokens, heads, d, generator=rng).to(device, dtype)
    large = torch.where(torch.rand(d, generator=rng) < 0.1, 8.0, 1.0)
    key = (torch.randn(rows, groups, coded, d, generator=rng) * large + large / 2).to(device, dtype)
    value = (torch.randn(rows, groups, coded, v, generator=rng) * 0.1).to(device, dtype)
    return query, quantized(key, format, group, keys == "channel"), quantized(value, format, group, False)


def wide(codes):
    return tuple(t if t is None or t.dtype == torch.uint8 else t.double() for t in codes)


# format, group, keys; tokens, heads, groups, d, v, coded; lengths, coded counts, starts, window, behind, splits
CASES = {
    "int8": ("int8", 32, "channel", 1, 4, 1, 64, 64, 96, [120, 90], None, [0, 41], None, 0, 2),
    "int4": ("int4", 32, "channel", 1, 7, 1, 64, 64, 96, [111, 63], None, None, None, 0, 2),
    "int2": ("int2", 32, "channel", 2, 2, 2, 32, 64, 64, None, None, [33, 0], None, 5, 1),
    "fp8": ("fp8", 32, "channel", 1, 4, 2, 128, 128, 64, [64, 1], None, None, None, 0, 1),
    "int8 by token": ("int8", 32, "token", 1, 4, 2, 64, 32, 96, [97, 30], None, [7, 0], None, 0, 2),
    "int4 by token, window": ("int4", 32, "token", 3, 2, 1, 96, 64, 96, [97, 96], None, None, 40, 0, 3),
    "fp8 by token": ("fp8", 64, "token", 1, 2, 1, 64, 64, 64, [70], None, None, None, 0, 1),
    "groups of 20": ("int8", 20, "channel", 1, 2, 1, 80, 80, 60, [61, 0], None, None, None, 0, 2),
    "groups of 27 channels": ("int4", 32, "token", 1, 2, 1, 80, 80, 32, [33], None, None, None, 0, 1),
    "groups of 128": ("int4", 128, "channel", 1, 2, 1, 48, 128, 128, None, [128, 50], None, None, 3, 2),
    "many new tokens": ("int8", 16, "channel", 12, 4, 1, 32, 64, 48, [48, 14], None, None, None, 0, 1),
}


def check(case, dtype, device, repeat=False):
    format, group, keys, tokens, heads, groups, d, v, coded, lengths, values, starts, window, behind, splits = CASES[
        case
    ]
    rows = len(lengths or values or starts)
    settings = format, group, keys
    query, key, value = inputs(rows, tokens, heads, groups, d, v, coded, settings, dtype, device)
    call = {"format": format, "group": group, "keys": keys, "window": window, "behind": behind}
    call |= {"lengths": counts(lengths, device), "coded": counts(values, device), "starts": counts(starts, device)}
    with only_kernels():
        out, lse = gqa_decode_quantized(query, *key, *value, d**-0.5, **call, splits=splits)
    expected = quantized_attention(query.double(), *wide(key), *wide(value), d**-0.5, **call)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close("out", out, expected[0], units=8)  # the query times the scale is rounded, too
    finite = expected[1].isfinite()
    assert torch.equal(lse.isfinite(), finite)
    # A logit is a sum of products of rounded numbers, the lse not smaller than its error.
    assert (lse - expected[1])[finite].abs().max() <= max(40 * EPSILON[dtype], 1e-5)
    if repeat:
        again = gqa_decode_quantized(query, *key, *value, d**-0.5, **call, splits=splits)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference(case, device):
    check(case, torch.float16, device, repeat=case == "int8")


@pytest.mark.parametrize("case", ["int4", "int8 by token", "fp8"])
def test_the_kernel_in_float32(case, device):
    check(case, torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_in_bfloat16(case, device):
    check(case, torch.bfloat16, device)


def test_layouts_without_a_kernel_run_as_the_reference(device):
    settings = ("int8", 8, "channel")
    query, key, value = inputs(1, 1, 2, 1, 16, 16, 8, settings, torch.float32, device)
    odd = tuple(tensor if tensor.shape[-1] < 16 else tensor[..., :15] for tensor in value)
    apart = (key[0].transpose(2, 3).contiguous().transpose(2, 3), *key[1:])
    for codes in ((*key, *odd), (*apart, *value)):
        out, lse = gqa_decode_quantized(query, *codes, 0.3, format="int8", group=8)
        expected = quantized_attention(query, *codes, 0.3, "int8", 8)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def test_every_code_is_a_number_of_the_format(device):
    """One token of weight 1 for each code: the output is the code times the scale, exactly."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    expected = codes.view(torch.float8_e4m3fn).float()
    codes[~expected.isfinite()], expected[~expected.isfinite()] = 0, 0  # no quantizer writes NaN
    value = codes.view(8, 1, 1, 32)
    one = torch.ones(8, 1, 1, 1, device=device)
    key = torch.zeros(8, 1, 1, 16, dtype=torch.uint8, device=device)
    query = torch.zeros(8, 1, 1, 16, device=device)
    call = {"format": "fp8", "group": 1, "keys": "token"}
    out, _ = gqa_decode_quantized(query, key, one, None, value, one, None, 1.0, **call)
    assert torch.equal(out.flatten(), expected)


@pytest.mark.parametrize(("format", "keys"), [("int8", "channel"), ("int2", "token"), ("fp8", "channel")])
def test_the_reference_reads_the_codes_of_the_cache(format, keys):
    rng = torch.Generator().manual_seed(0)
    layer = QuantizedKVLayer(format, group=8, window=3, keys=keys)
    query = torch.randn(2, 2, 4, 20, generator=rng, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 21, width, generator=rng, dtype=torch.float64) for width in (20, 12))
    expected = grouped_query_attention(query, *layer.update(key, value), 0.3, window=9)
    assert (layer.key_codes.tokens, layer.keys.shape[-2]) == (16, 5)
    codes = [t for part in (layer.key_codes, layer.value_codes) for t in (part.codes, part.scale, part.zero)]
    call = {"format": format, "group": 8, "keys": keys, "window": 9, "behind": 5}
    parts = [quantized_attention(query, *codes, 0.3, **call)]
    parts.append(grouped_query_attention(query, layer.keys, layer.values, 0.3, window=9))
    for result, want in zip(merge_parts(*zip(*parts, strict=True)), expected, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-10, atol=1e-10)


def test_codes_and_the_exact_tail_are_one_cache(device):
    """A cache's update and attention of PyTorch, against codes and tail read where they lie and merged."""
    rng = torch.Generator().manual_seed(0)
    layer = QuantizedKVLayer("int8", group=32, window=8)
    query = torch.randn(2, 3, 4, 32, generator=rng).to(device, torch.float16)
    key, value = (torch.randn(2, 2, 75, 32, generator=rng).to(device, torch.float16) for _ in range(2))
    expected = grouped_query_attention(query.double(), *(t.double() for t in layer.update(key, value)), 0.3)
    codes = [t for part in (layer.key_codes, layer.value_codes) for t in (part.codes, part.scale, part.zero)]
    behind = layer.keys.shape[-2]
    parts = [gqa_decode_quantized(query, *codes, 0.3, format="int8", group=32, behind=behind)]
    parts.append(gqa_decode(query, layer.keys, layer.values, 0.3))
    out, _ = merge_parts(*zip(*parts, strict=True))
    # The cache rounds what it dequantizes to its dtype.
    assert relative_error(out, expected[0]) < 2e-3


EXAMPLES = {
    "gqa_decode_quantized": Example(
        gqa_decode_quantized,
        _quantized.registered,
        quantized_attention,
        {"query": normal(2, 1, 4, 16), "scale": 0.3, "format": "int4", "group": 8, "keys": "channel", "behind": 0}
        | {"lengths": ints(9, 3)}
        | coded("key", 16, 2, "int4", 8, True, "_codes _scale _zero")
        | coded("value", 16, 2, "int4", 8, False, "_codes _scale _zero"),
        [
            ({"format": "int3"}, "int3"),
            ({"keys": "head"}, "head"),
            ({"group": 5}, "whole groups"),
            ({"key_scale": zeros(2, 2, 3, 16)}, "scales of keys"),
            ({"value_scale": zeros(2, 2, 8, 0)}, "scales of values"),
            ({"key_zero": None}, "zero points of keys"),
            ({"value_zero": zeros(2, 2, 8, 3)}, "zero points of values"),
            ({"value_scale": zeros(2, 2, 8, 1).half(), "value_zero": zeros(2, 2, 8, 1).half()}, "float16"),
            ({"key_codes": zeros(2, 2, 4, 16)}, "uint8"),
            ({"coded": zeros(2)}, "coded"),
            ({"behind": -1}, "behind"),
        ],
    ),
}
COMPILED = [slow(Compiled("compile_gqa_decode:quantized", any_kind))]
