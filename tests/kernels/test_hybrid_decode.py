"""Decoding over full and streaming heads: kernel, reference, the cache's own masks, and the model's attention."""

import random

import pytest
import torch
from hybrid_operators import through_operators
from kernel_checks import assert_close
from kernel_examples import Compiled, Example, ints, normal, slow, zeros
from own_models import LAYERS, agree, hybrid_entry, hybrid_model, through_cache, tiny_source, tokens

from surgery.kernels.hybrid_decode.operator import _hybrid_decode, hybrid_decode
from surgery.kernels.hybrid_decode.reference import hybrid_attention
from surgery.model.hybrid_attention import HybridAttention
from surgery.model.hybrid_cache import StreamingLayer
from surgery.model.left_padding import LeftPadding

CASES = {
    "one token": {"lengths": [63, 111]},
    "every row full": {"lengths": None, "splits": 2},
    "empty splits": {"lengths": [1, 70], "splits": 5},
    "an empty row": {"lengths": [0, 111], "splits": 2},
    "three tokens": {"tokens": 3, "lengths": [3, 90], "splits": 2},
    "padding": {"lengths": [80, 111], "starts": [0, 100], "splits": 2},
    "new tokens that are padding": {"tokens": 3, "lengths": [40, 40], "starts": [38, 45], "sink_slots": 2, "splits": 5},
    "sinks on their way": {"lengths": [30, 30], "starts": [0, 9], "sink_slots": 8, "slots": 20},
    "no sinks": {"tokens": 3, "lengths": [111, 60], "sinks": 0, "sink_slots": 0, "recent": 16},
    "more heads than rows": {"heads": 28, "full": 1, "streaming": 3, "rows": 1, "lengths": [50]},
    "all full": {"streaming": 0, "lengths": [20, 111], "splits": 2},
    "all streaming": {"full": 0, "lengths": [60, 111]},
    "widths": {"head_size": 48, "value_size": 40, "lengths": [33, 64], "splits": 2},
}


def inputs_of(
    *,
    rows=2,
    tokens=1,
    heads=8,
    full=2,
    streaming=2,
    capacity=111,
    head_size=32,
    value_size=32,
    sinks=8,
    recent=40,
    sink_slots=8,
    slots=50,
    lengths=None,
    starts=None,
    splits=None,
    dtype=torch.float32,
    device="cpu",
):
    """Positional inputs of the operator, with NaN where nothing may be read; strides as views of longer caches have."""
    rng = torch.Generator().manual_seed(0)

    def random_tensor(*shape):
        return torch.randn(*shape, generator=rng).to(device, dtype)

    query = random_tensor(rows, heads, tokens, head_size).transpose(1, 2)
    full_key, full_value = (
        random_tensor(rows, full, capacity + 9, n)[:, :, :capacity] for n in (head_size, value_size)
    )
    streaming_key, streaming_value = (
        random_tensor(rows, slots, streaming, n).transpose(1, 2) for n in (head_size, value_size)
    )
    for row in range(rows):
        length = capacity if lengths is None else lengths[row]
        start = starts[row] if starts else 0
        window_start = length - (slots - sink_slots)
        for cached in (full_key, full_value):
            cached[row, :, length:] = torch.nan
            cached[row, :, : max(0, min(start, length - tokens))] = torch.nan
        for cached in (streaming_key, streaming_value):
            cached[row, :, max(0, window_start - start) : sink_slots] = torch.nan  # empty
            cached[row, :, sink_slots : sink_slots + max(0, min(start, length - tokens) - window_start)] = torch.nan
    counts = (None if n is None else torch.tensor(n, dtype=torch.int32, device=device) for n in (lengths, starts))
    cached = full_key, full_value, streaming_key, streaming_value
    return query, *cached, head_size**-0.5, sink_slots, sinks, recent, *counts, splits


def check(inputs):
    out, lse = _hybrid_decode(*inputs)
    wide = [each.double() if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs]
    expected, expected_lse = hybrid_attention(*wide[:-1])
    assert_close("out", out, expected)
    assert_close("lse", lse, expected_lse)
    return out, lse


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference(case, device):
    check(inputs_of(**CASES[case], device=device))


@pytest.mark.parametrize("case", ["an empty row", "new tokens that are padding", "widths"])
def test_the_kernel_is_the_reference_in_float16(case, device):
    inputs = inputs_of(**CASES[case], dtype=torch.float16, device=device)
    (out, lse), again = check(inputs), _hybrid_decode(*inputs)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_the_reference_in_bfloat16(case, device):
    check(inputs_of(**CASES[case], dtype=torch.bfloat16, device=device))


@pytest.mark.parametrize(("dtype", "rounds", "tolerance"), [(torch.float64, 30, 1e-10), (torch.float32, 1, 1e-5)])
def test_each_query_sees_what_the_cache_says(dtype, rounds, tolerance, device):
    """Every query of a `StreamingLayer`, of padding too, in any chunks."""
    rng = random.Random(0)
    torch.manual_seed(0)
    for _ in range(rounds):
        layer = StreamingLayer(rng.choice([0, 1, 4]), rng.choice([1, 2, 7, 16]))
        layer.padding = LeftPadding([0, rng.choice([0, 2, 14]), rng.choice([0, 5, 20])])
        starts = layer.padding.on(device, torch.int32)
        for chunk in rng.choices([1, 2, 9], k=6):
            query = torch.randn(3, 4, chunk, 8, dtype=dtype, device=device)
            sink_slots = layer.sink_keys.shape[2] if layer.is_initialized else 0
            visible = layer.visible(chunk, query.device)
            key, value = layer.update(*torch.randn(2, 3, 2, chunk, 8, dtype=dtype, device=device))
            logits = 0.3 * query @ key.repeat_interleave(2, dim=1).mT
            weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
            expected = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
            none = key.new_empty(3, 0, layer.seen, 8)
            settings = {"sink_slots": sink_slots, "sinks": layer.sinks, "recent": layer.recent, "starts": starts}
            out, _ = hybrid_decode(query.transpose(1, 2), none, none, key, value, 0.3, **settings)
            agree(out, expected, tolerance)
            # A full head sees itself alone where it is padding.
            own = torch.arange(layer.seen - chunk, layer.seen, device=device) < starts[:, None]
            everything = torch.randn(2, 3, 2, layer.seen, 8, dtype=dtype, device=device)
            none = key.new_empty(3, 0, chunk, 8)
            settings |= {"sink_slots": 0}
            out, _ = hybrid_decode(query.transpose(1, 2), *everything, none, none, 0.3, **settings)
            alone = everything[1][:, :, -chunk:].repeat_interleave(2, dim=1).transpose(1, 2)
            agree(out[own], alone[own], tolerance)


@torch.no_grad()
def test_the_model_decodes_by_the_operators(monkeypatch):
    """Any heads, compensated ones too, in any chunks, padded."""
    rng = random.Random(1)
    for _ in range(6):
        windows = ({"sinks": rng.choice([0, 1, 4]), "recent": rng.choice([1, 2, 7])} for _ in range(LAYERS))
        heads = rng.sample([(2, 0), (0, 0), (3, 0), (1, 1), (0, 2)], LAYERS)
        entries = [
            hybrid_entry(full, rng.sample(range(4), 4), compensated, **window)
            for (full, compensated), window in zip(heads, windows, strict=True)
        ]
        chunks = rng.choice([[9, 8, 1, 1, 1, 1, 1], [1, 1, 9, 9, 1, 1], [20, 1, 1]])
        agree_with_operators(entries, [0, rng.choice([0, 3, 10])], chunks, torch.float64, 1e-10, monkeypatch)


@torch.no_grad()
def test_the_model_decodes_by_the_kernels(monkeypatch):
    entries = [
        hybrid_entry(2, [3, 1, 0, 2], sinks=1, recent=4),
        hybrid_entry(1, [2, 0, 1, 3], 1, sinks=4, recent=2),
    ]
    agree_with_operators(entries, [0, 3], [9, 8, 1, 1], torch.float32, 2e-5, monkeypatch)


def agree_with_operators(entries, padding, chunks, dtype, tolerance, monkeypatch):
    """Compare the logits of `HybridAttention` with those of both operators instead of its attention."""
    source = tiny_source("llama", num_attention_heads=8, num_key_value_heads=4).to(dtype)
    model, ids = hybrid_model(source, entries).to(dtype), tokens(2, sum(chunks))
    expected = through_cache(model, ids, padding, chunks)
    with monkeypatch.context() as patch:
        patch.setattr(HybridAttention, "forward", through_operators)
        result = through_cache(model, ids, padding, chunks)
    for row, first in enumerate(padding):
        agree(result[row, first:], expected[row, first:], tolerance)


EXAMPLES = {
    "hybrid_decode": Example(
        hybrid_decode,
        _hybrid_decode.registered,
        hybrid_attention,
        {"query": normal(2, 2, 4, 8), "scale": 0.3, "sink_slots": 1, "sinks": 1, "recent": 4}
        | {"full_key": normal(2, 1, 10, 8), "full_value": normal(2, 1, 10, 8)}
        | {"streaming_key": normal(2, 1, 6, 8), "streaming_value": normal(2, 1, 6, 8)}
        | {"lengths": ints(4, 9), "starts": ints(0, 1)},
        [
            ({"query": zeros(2, 2, 7, 8)}, "7 query heads must be a multiple of 2 KV heads"),
            ({"streaming_key": zeros(2, 1, 6, 4)}, "keys .* and values"),
            ({"full_value": zeros(2, 1, 10, 8).half()}, "full_value is torch.float16"),
            ({"lengths": torch.tensor([1, 2])}, r"lengths must be int32 \[2\], not torch.int64"),
            ({"sink_slots": 2}, "sink_slots must be from 0 to 1, not 2"),
            ({"query": zeros(2, 6, 4, 8)}, "6 new tokens exceed 5 window slots"),
            ({"splits": 0}, "splits must be at least 1, not 0"),
        ],
    ),
}


def of_a_warp(name, capability, mma):
    return mma == ["mma"] or "decode" not in name or "float32" in name


COMPILED = [slow(Compiled("compile_hybrid_decode:hybrid_decode_launches", of_a_warp))]
