"""Latent attention over codes: the kernel against its reference, and the reference against the cache that it serves."""

import pytest
import torch
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, coded, ints, normal, of_the_gpu, slow, zeros

from surgery.kernels.launch import Config
from surgery.kernels.mla_decode import quantized_kernel as kernel
from surgery.kernels.mla_decode.quantized_operator import _mla_decode_quantized, mla_decode_quantized
from surgery.kernels.mla_decode.quantized_reference import quantized_latent_attention
from surgery.kernels.mla_decode.reference import ragged_latent_attention
from surgery.kernels.operation import attention_outputs
from surgery.kernels.quantization import BITS, dequantized
from surgery.kernels.split_kv import merge
from surgery.model.quantized_cache import GroupedCodes, QuantizedKVLayer

FORMATS = ("int8", "int4", "int2", "fp8")
ROWS = ("lengths", "coded", "starts", "key_gain", "window")


def codes_of(tokens, format, group, by_channel):
    """codes, scales and zeros of tokens [B, S, n], as the cache makes them."""
    result = GroupedCodes(tokens.unsqueeze(1), format, group, by_channel=by_channel)
    result.append(tokens.unsqueeze(1))
    return tuple(None if t is None else t.squeeze(1) for t in (result.codes, result.scale, result.zero))


def inputs(batch, tokens, heads, total, rank, rope, format, group, by_channel, dtype=torch.float32, device="cpu"):
    """Query, then the codes of latents and rotated keys, with a few large channels in the latents."""
    generator = torch.Generator().manual_seed(total + rank)
    query = torch.randn(batch, tokens, heads, rank + rope, generator=generator)
    latent = torch.randn(batch, total, rank, generator=generator) * torch.linspace(0.2, 3, rank)
    rope_key = torch.randn(batch, total, rope, generator=generator)
    query, latent, rope_key = (t.to(device, dtype) for t in (query, latent, rope_key))
    return query, *codes_of(latent, format, group, by_channel), *codes_of(rope_key, format, group, False)


def wide(values):
    """Floating-point tensors in float64."""
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


def run(tensors, settings, *, splits=1, block_rows=16, block_tokens=None, chunk=16, **extra):
    query, codes = tensors[:2]
    format = settings[0]
    tokens = block_tokens or max(16, 16 * 8 // BITS[format])
    out, lse = attention_outputs(query, codes.shape[-1])
    config = Config(block_rows, tokens, chunk, splits)
    for launch in kernel.launches(*tensors, 0.1, *settings, **extra, out=out, lse=lse, config=config):
        launch.run()
    return out, lse


def check(tensors, settings, *, splits=1, block_tokens=None, chunk=16, **extra):
    """The kernel against the reference in float64; of fp16, dequantized numbers are rounded once more."""
    result = run(tensors, settings, splits=splits, block_tokens=block_tokens, chunk=chunk, **extra)
    rest = wide([extra.get(name) for name in ROWS])
    expected = quantized_latent_attention(*wide(tensors), 0.1, *settings, *rest)
    assert_close("out", result[0], expected[0], units=6)
    assert_close("lse", result[1], expected[1], units=2**12 if tensors[0].dtype == torch.float16 else 4)
    return result


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_the_reference_reads_what_the_cache_holds(format, by_channel):
    """Merged with attention over the full-precision tokens after the codes, it is attention over what the cache
    returns."""
    layer = QuantizedKVLayer(format, 8, 4, "channel" if by_channel else "token")
    new = [torch.randn(2, 1, 30, width, dtype=torch.float64) for width in (20, 10)]
    read = [t.squeeze(1) for t in layer.update(*new)]
    query = torch.randn(2, 3, 4, 30, dtype=torch.float64)
    values = layer.key_codes.tokens
    parts = [(c.codes, c.scale, c.zero) for c in (layer.key_codes, layer.value_codes)]
    flat = [t if t is None else t.squeeze(1) for part in parts for t in part]
    latent = dequantized(*flat[:3], BITS[format], 8 if by_channel else None, torch.float64)
    torch.testing.assert_close(latent, read[0][:, :values], rtol=1e-12, atol=1e-12)
    old = mla_decode_quantized(query, *flat, 0.3, format=format, group=8, by_channel=by_channel, lengths=ints(30, 30))
    recent = ragged_latent_attention(query, *(t[:, values:] for t in read), 0.3)
    both = merge(
        torch.stack([old[0], recent[0]], dim=-2).flatten(0, 2), torch.stack([old[1], recent[1]], dim=-1).flatten(0, 2)
    )
    expected = ragged_latent_attention(query, *read, 0.3)
    torch.testing.assert_close(both[0].view_as(expected[0]), expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(both[1].view_as(expected[1]), expected[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("by_channel", [True, False])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_formats(format, by_channel, dtype, device):
    """Groups of 32, within a step or across steps, of tokens that end and begin anywhere."""
    settings = (format, 32, by_channel)
    tensors = inputs(2, 2, 5, 96, 48, 16, *settings, dtype, device)
    check(tensors, settings, splits=2, lengths=ints(99, 71, device=device), starts=ints(0, 35, device=device))


@pytest.mark.parametrize(
    ("heads", "rank", "rope", "total", "group", "format", "by_channel", "chunk", "block_tokens"),
    [
        (1, 96, 0, 64, 64, "int4", True, 32, 32),  # a group of several steps
        (7, 40, 12, 48, 24, "int8", True, 64, 16),  # groups that are no multiples of steps, a masked chunk
        (28, 80, 24, 32, 32, "int8", False, 16, 32),  # nearly equal groups of channels: 27, 27, 26
        (7, 64, 16, 32, 64, "fp8", False, 32, 16),  # one scale a token
    ],
)
def test_any_shape(heads, rank, rope, total, group, format, by_channel, chunk, block_tokens, device):
    settings = (format, group, by_channel)
    tensors = inputs(1, 1, heads, total, rank, rope, *settings, torch.float32, device)
    check(tensors, settings, chunk=chunk, block_tokens=block_tokens, lengths=ints(total - 5, device=device))


@pytest.mark.parametrize(("format", "by_channel"), [("int8", True), ("int4", False), ("fp8", False)])
def test_what_nothing_sees_is_never_used(format, by_channel, device):
    """Codes, scales and zeros after the codes, after a row and before it; a row without tokens; the same bits."""
    settings = (format, 16, by_channel)
    tensors = inputs(3, 1, 4, 80, 32, 16, *settings, torch.float32, device)
    extra = {
        "lengths": ints(90, 80, 0, device=device),
        "coded": ints(80, 48, 80, device=device),
        "starts": ints(32, 0, 0, device=device),
        "window": 70,
        "key_gain": torch.rand(3, 80, 2, device=device) + 0.5,
    }
    clean = check(tensors, settings, splits=2, **extra)
    assert clean[0][2].abs().max() == 0 and (clean[1][2] == -torch.inf).all()
    token = torch.arange(80, device=device)
    hidden = (token >= extra["coded"][:, None]) | (token < extra["starts"][:, None]) | (extra["lengths"] == 0)[:, None]
    for tensor in tensors[1:]:
        if tensor is not None:
            tensor[hidden[:, :: 80 // tensor.shape[1]]] = torch.nan if tensor.is_floating_point() else 127
    extra["key_gain"][hidden] = torch.nan
    poisoned = run(tensors, settings, splits=2, **extra)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_the_operator_runs_the_kernel(device, caplog):
    settings = ("int8", 32, True)
    tensors = inputs(1, 1, 4, 64, 64, 16, *settings, torch.float32, device)
    names = dict(zip(("format", "group", "by_channel"), settings, strict=True))
    expected = quantized_latent_attention(*wide(tensors), 0.1, *settings)
    for result, want in zip(mla_decode_quantized(*tensors, 0.1, **names), expected, strict=True):
        assert_close("operator", result, want)
    assert not caplog.records


EXAMPLES = {
    "mla_decode_quantized": Example(
        mla_decode_quantized,
        _mla_decode_quantized.registered,
        quantized_latent_attention,
        {"query": normal(2, 1, 2, 20), "scale": 0.2, "format": "int8", "group": 8, "by_channel": True, "window": 11}
        | {"lengths": ints(10, 7)}
        | coded("", 16, 0, "int8", 8, True, "codes scales zeros")
        | coded("rope_", 4, 0, "int8", 8, False, "codes scales zeros"),
        [
            ({"format": "int3"}, "format"),
            ({"format": "int4", "group": 3}, "group of 3"),
            ({"group": 4}, "scales"),
            ({"by_channel": False}, "scales"),
            ({"zeros": None}, "zeros"),
            ({"codes": zeros(2, 8, 16, dtype=torch.int32)}, "uint8"),
            ({"query": zeros(2, 1, 2, 19)}, "query"),
            ({"coded": torch.tensor([1])}, "coded"),
        ],
    ),
    "mla_decode_quantized in fp8": Example(
        mla_decode_quantized,
        _mla_decode_quantized.registered,
        quantized_latent_attention,
        {"query": normal(2, 1, 2, 20), "scale": 0.2, "format": "fp8", "group": 8, "by_channel": True}
        | coded("", 16, 0, "fp8", 8, True, "codes scales zeros")
        | coded("rope_", 4, 0, "fp8", 8, False, "codes scales zeros"),
        [],
    ),
}
COMPILED = [slow(Compiled("compile_mla_decode:quantized_cases", of_the_gpu))]
