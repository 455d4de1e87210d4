"""Attention to sinks and windows: kernel, reference, and what a streaming cache sees.

The model's own attention is compared in `test_hybrid_decode.py`, with both operators in its place.
"""

import pytest
import torch
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, ints, normal, of_the_gpu, slow, zeros
from own_models import agree

from surgery.kernels.launch import Config
from surgery.kernels.sink_recent_prefill.kernel import launches
from surgery.kernels.sink_recent_prefill.operator import _sink_recent_prefill, sink_recent_prefill
from surgery.kernels.sink_recent_prefill.reference import sink_recent_attention
from surgery.model.hybrid_cache import StreamingLayer
from surgery.model.left_padding import LeftPadding

CASES = {
    "a tile's parts": {"sinks": [0, 3, 8], "recent": [-1, 5, 16]},
    "sinks of many tiles": {"sinks": [40, 33, 200], "recent": [1, 30, 2]},
    "inner tiles": {"sinks": [4, 0, 17], "recent": [48, 60, 79]},
    "full heads": {"sinks": [0, 5, 0], "recent": [-1, 500, 79]},
    "padding": {"starts": [0, 37], "sinks": [20, 4, 0], "recent": [-1, 16, 40]},
    "padding to the end": {"starts": [50, 90], "sinks": [1, 4, 0], "recent": [-1, 16, 40]},
    "a chunk behind others": {"tokens": 41, "starts": [3, 60], "sinks": [16, 4, 0], "recent": [-1, 16, 33]},
    "one token": {"tokens": 1, "starts": [0, 7], "sinks": [16, 4, 0], "recent": [-1, 16, 33]},
    "a text of one token": {"positions": 1, "sinks": [0, 0, 1], "recent": [-1, 1, 2]},
    "widths": {"positions": 63, "head_size": 48, "value_size": 20, "sinks": [4, 0, 8], "recent": [-1, 16, 20]},
}
# Small tiles, so that a short text has all kinds of them.
TILES = Config(block_rows=32, block_tokens=16)


def inputs_of(
    *,
    sinks,
    recent,
    rows=2,
    positions=79,
    tokens=None,
    size=1,
    head_size=16,
    value_size=16,
    starts=None,
    dtype=torch.float32,
    device="cpu",
):
    """Positional inputs of the operator, with NaN where nothing may be read; strides as projections leave them."""
    rng = torch.Generator().manual_seed(0)
    groups, tokens = len(sinks), tokens or positions

    def random_heads(count, heads, width):
        return torch.randn(rows, count, heads, width, generator=rng).to(device, dtype).transpose(1, 2)

    query = random_heads(tokens, groups * size, head_size)
    key, value = random_heads(positions, groups, head_size), random_heads(positions, groups, value_size)
    for row, start in enumerate(starts or []):
        for cached in (key, value):
            cached[row, :, : min(start, positions - tokens)] = torch.nan
    counts = (None if n is None else torch.tensor(n, dtype=torch.int32, device=device) for n in (sinks, recent, starts))
    return query, key, value, head_size**-0.5, *counts


def by_kernel(inputs, config):
    query, _, value, *_ = inputs
    rows, heads, tokens, _ = query.shape
    out = query.new_empty(rows, tokens, heads, value.shape[-1])
    lse = torch.empty(rows, heads, tokens, device=query.device)
    for launch in launches(*inputs, out=out, lse=lse, config=config):
        launch.run()
    return out, lse


def check(inputs, config):
    out, lse = by_kernel(inputs, config) if config else _sink_recent_prefill(*inputs)
    expected, expected_lse = sink_recent_attention(*(each.double() for each in inputs[:3]), *inputs[3:])
    assert_close("out", out, expected)
    assert_close("lse", lse, expected_lse)
    return out, lse


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference(case, device):
    check(inputs_of(**CASES[case], device=device), TILES)


def test_the_operator_takes_the_kernel(device):
    shape = {"positions": 150, "rows": 1, "size": 2, "starts": [9], "dtype": torch.float16, "device": device}
    inputs = inputs_of(sinks=[0, 20], recent=[-1, 30], **shape)
    (out, lse), again = check(inputs, None), _sink_recent_prefill(*inputs)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("config", [TILES, None])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference_in_bfloat16(case, config, device):
    check(inputs_of(**CASES[case], dtype=torch.bfloat16, device=device), config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_long_text_on_a_gpu(dtype, device):
    sizes = {"positions": 1500, "tokens": 1411, "size": 4, "head_size": 128, "value_size": 128}
    check(
        inputs_of(sinks=[64, 0, 16], recent=[-1, 256, 1024], starts=[0, 300], dtype=dtype, device=device, **sizes), None
    )


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (4, 7), (1, 16), (4, 40)])
def test_each_query_sees_what_the_cache_says(sinks, recent):
    """Check padding too; a full head's query sees everything, and itself alone where it is padding."""
    torch.manual_seed(0)
    layer = StreamingLayer(sinks, recent)
    layer.padding = LeftPadding([0, 3, 12, 50])
    query = torch.randn(4, 4, 30, 8, dtype=torch.float64)
    key, value = torch.randn(2, 4, 2, 30, 8, dtype=torch.float64)
    starts = torch.tensor(layer.padding.tolist(), dtype=torch.int32)
    visible = layer.visible(30, query.device)
    wide = StreamingLayer(0, 30)
    wide.padding = layer.padding
    visible = torch.cat([wide.visible(30, query.device), visible], dim=1).repeat_interleave(2, dim=1)
    logits = 0.3 * query @ key.repeat_interleave(2, dim=1).mT
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
    counts = (torch.tensor(each, dtype=torch.int32) for each in ([0, sinks], [-1, recent]))
    out, _ = sink_recent_prefill(query, key, value, 0.3, *counts, starts=starts)
    agree(out, expected, 1e-10)


def test_long_texts_are_cut_by_the_reference(monkeypatch):
    inputs = inputs_of(**CASES["padding"], dtype=torch.float64)
    expected = sink_recent_attention(*inputs)
    monkeypatch.setattr("surgery.kernels.sink_recent_prefill.reference.QUERIES", 10)
    for result, right in zip(sink_recent_attention(*inputs), expected, strict=True):
        agree(result, right, 1e-12)


EXAMPLES = {
    "sink_recent_prefill": Example(
        sink_recent_prefill,
        _sink_recent_prefill.registered,
        sink_recent_attention,
        {"query": normal(2, 2, 9, 8), "key": normal(2, 2, 9, 8), "value": normal(2, 2, 9, 8), "scale": 0.3}
        | {"sinks": ints(1, 0), "recent": ints(-1, 3), "starts": ints(0, 2)},
        [
            ({"query": zeros(2, 7, 9, 8)}, "7 query heads must be a multiple of 2 KV heads"),
            ({"query": zeros(2, 2, 10, 8)}, "10 queries need at least as many keys, not 9"),
            ({"key": zeros(2, 2, 8, 8)}, "must agree in d"),
            ({"value": zeros(2, 2, 9, 8).half()}, "must have the same dtype"),
            ({"recent": zeros(2)}, r"recent must be int32 \[2\], not torch.float64"),
            ({"starts": ints(1, 1, 1)}, r"starts must be int32 \[2\]"),
        ],
    ),
}
COMPILED = [slow(Compiled("compile_sink_recent_prefill:sink_recent_prefill_launches", of_the_gpu))]
