"""Attention over packed rows, block by block, against attention over all decoded values at once."""

import pytest
import torch

from surgery.model import blockwise_rows
from surgery.model.attention_functions import rotate_pairs
from surgery.model.blockwise_rows import BLOCK, BlockwiseRows
from surgery.model.left_padding import LeftPadding
from surgery.model.token_cache import TokenCacheLayer
from surgery.model.token_format import TokenFormat
from surgery.model.token_quantizer import TokenQuantizer

HEADS, FIRST = 3, 4
FORMATS = {
    "every pattern": (
        (("8", 2), ("5+3", 4), ("4+4", 2), ("3+3+2", 2), ("2+2+2+2", 4), ("8x1", 2)),
        (("5+3", 2), ("4+4", 4), ("3+3+2", 2), ("2+2+2+2", 2)),
    ),
    "fewer fields after more": ((("2+2+2+2", 2), ("8", 4), ("4+4", 2)), (("3+3+2", 4), ("8", 2))),
    "nothing rotated": ((("4+4", 8),), ()),
}


def _case(latent_runs, rope_runs, tokens: int, padding: list[int], queries: int):
    """A quantizer, a filled cache and rotated queries, from fixed seeds."""
    generator = torch.Generator().manual_seed(0)
    rank, token_format = TokenFormat(latent_runs).channels, TokenFormat((*latent_runs, *rope_runs))
    quantizer = TokenQuantizer(token_format)
    quantizer.step = torch.rand(token_format.channels, generator=generator) * 0.2 + 0.05
    quantizer.mean = torch.randn(token_format.channels, generator=generator)
    layer = TokenCacheLayer(token_format.row_bytes, token_format.channels, FIRST)
    layer.padding = LeftPadding(padding)
    values = torch.randn(len(padding), 1, tokens, token_format.channels, generator=generator)
    rows, _ = layer.update(quantizer.encode(values), values)
    query = torch.randn(len(padding), HEADS, queries, token_format.channels, generator=generator) / 2
    inv_freq = torch.rand((token_format.channels - rank) // 2, generator=generator)
    angles = torch.arange(tokens - queries, tokens)[:, None].double() * inv_freq.double()
    query[..., rank:] = rotate_pairs(query[..., rank:].double(), angles.cos(), angles.sin()).float()
    return quantizer, layer, rows, query, inv_freq, rank


def _expected(quantizer, layer, rows, query, inv_freq, rank, visible, gains):
    """The same in fp64, of everything decoded at once."""
    values = layer.with_first(quantizer.decode(rows, torch.float64))
    angles = torch.arange(values.shape[2])[None, None, :, None].double() * inv_freq.double()
    cos, sin = angles.cos(), angles.sin()
    key = torch.cat((values[..., :rank], rotate_pairs(values[..., rank:], cos, sin)), -1)
    scores = query.double() @ key.mT * gains
    return scores.masked_fill(~visible, -1e30).softmax(-1) @ values[..., :rank]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "padding", "queries"), [(9, [0], 1), (BLOCK + 5, [0, 7], 1), (60, [3, 0], 3)])
def test_it_is_attention_over_all_decoded_values(name, tokens, padding, queries, monkeypatch):
    if queries > 1:
        monkeypatch.setattr(blockwise_rows, "BLOCK", 16)  # many small blocks, the first ones padding in part
    quantizer, layer, rows, query, inv_freq, rank = _case(*FORMATS[name], tokens, padding, queries)
    keys = torch.arange(tokens)
    visible = (keys[None] <= torch.arange(tokens - queries, tokens)[:, None]) & (
        keys[None, None] >= layer.padding.on(keys.device)[:, None, None]
    )
    visible = visible[:, None]
    gains = torch.rand(len(padding), HEADS, 1, tokens, generator=torch.Generator().manual_seed(1)) + 0.5
    want = _expected(quantizer, layer, rows, query, inv_freq, rank, visible, gains)
    blocks, starts = BlockwiseRows(*FORMATS[name], inv_freq), layer.padding.on(rows.device)
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    for mask in (visible, additive, *([None] if not any(padding) else [])):
        result = blocks.attend(query, rows[:, 0], layer.values[:, 0], quantizer, starts, mask=mask, gains=gains)
        assert (result - want).abs().max() < 2e-5
