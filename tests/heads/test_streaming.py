"""Streaming heads without a cache are full heads under a mask of sinks and recent tokens."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from surgery.heads import streaming
from surgery.heads.streaming import mixed_output, streaming_output
from surgery.running.attention_tap import AttentionCall


def make_call(length, mask=None):
    generator = torch.Generator().manual_seed(length)
    query, key, value = (
        torch.randn(2, heads, length, width, generator=generator, dtype=torch.float64)
        for heads, width in ((6, 8), (3, 8), (3, 10))
    )
    return AttentionCall(0, query, key, value, mask, 0.3)


def dense(call, sinks, recent):
    """Attention under the mask, from its definition."""
    length = call.query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & ((distance < recent) | (torch.arange(length) < sinks))
    if call.mask is not None:
        mask = mask & call.mask
    key, value = (part.repeat_interleave(2, dim=1) for part in (call.key, call.value))
    return scaled_dot_product_attention(call.query, key, value, mask, scale=call.scaling).transpose(1, 2)


@pytest.mark.parametrize("piece", [1, 7, 1024])
@pytest.mark.parametrize("sinks, recent", [(0, 1), (3, 4), (4, 3), (0, 5), (16, 1), (2, 200)])
@pytest.mark.parametrize("length", [1, 16, 97])
def test_is_the_dense_mask(monkeypatch, piece, sinks, recent, length):
    monkeypatch.setattr(streaming, "PIECE", piece)
    call = make_call(length)
    assert torch.allclose(streaming_output(call, sinks, recent), dense(call, sinks, recent), atol=1e-12)


def test_a_mask_of_the_call_holds_too(monkeypatch):
    monkeypatch.setattr(streaming, "PIECE", 8)
    positions = torch.arange(50)
    window = ((positions[:, None] - positions < 6) & (positions <= positions[:, None]))[None, None]
    call = make_call(50, window)
    assert torch.allclose(streaming_output(call, 4, 9), dense(call, 4, 9), atol=1e-12)


@pytest.mark.parametrize("streams", [(False, False, False), (True, False, True), (True, True, True)])
def test_heads_of_both_kinds(streams):
    call, out = make_call(40), mixed_output(make_call(40), torch.tensor(streams), 2, 5)
    for head, streaming_head in enumerate(streams):
        expected = dense(call, 2, 5 if streaming_head else 100)[:, :, 2 * head : 2 * head + 2]
        assert torch.allclose(out[:, :, 2 * head : 2 * head + 2], expected, atol=1e-12)
