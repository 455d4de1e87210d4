"""MLA and low rank in bits in the plugin for vLLM, as far as it runs without vLLM; tests/engines runs it in vLLM."""

from types import SimpleNamespace

import pytest
import torch
from no_host_sync import NoHostSync

from surgery.model.attention_functions import rotate_pairs
from surgery.model.low_rank_entry import Block
from surgery.model.quantized_latent_entry import QuantizedLatentEntry
from surgery.model.quantized_low_rank_entry import QuantizedLowRankEntry
from surgery.model.token_format import TokenFormat
from surgery.model.token_quantizer import TokenQuantizer
from surgery_vllm.row_layout import RowLayout
from surgery_vllm.row_values import first_slots, rows_of, values_at, vectors_of

LATENT, ROPE, FIRST = (("5+3", 2), ("2+2+2+2", 2)), (("4+4", 2),), 4
CONFIG = SimpleNamespace(base_model_type="llama")
RANK, INV_FREQ = 12, torch.tensor([1.0, 0.01])


@pytest.fixture(params=[0, RANK], ids=["plain", "predicted"])
def quantizer(request) -> TokenQuantizer:
    torch.manual_seed(0)
    result = TokenQuantizer(TokenFormat((*LATENT, *ROPE)), request.param)
    if request.param:
        result.correction.normal_()
    result.step.uniform_(4, 6).div_(result.highest + 1)
    result.mean.normal_(0, 0.1)
    return result


@pytest.mark.parametrize("gains", [0, 2])
@pytest.mark.parametrize("has_first", [True, False])
def test_rows_are_read_as_the_model_class_reads_them(quantizer, gains, has_first):
    """Requests longer and shorter than their first tokens; what has not come is not a number."""
    tokens, lens = 9, torch.tensor([9, 2])
    values, scales = torch.randn(2, tokens, RANK + 4), torch.rand(2, tokens, gains)
    first = values[:, :FIRST].clone()
    first[1, 2:] = torch.nan
    with NoHostSync():
        rows = rows_of(torch.cat((values, scales), dim=-1).flatten(0, 1), quantizer).unflatten(0, (2, tokens))
        result = vectors_of(rows, quantizer, INV_FREQ, first if has_first else None, lens)
    assert rows.shape[-1] == quantizer.format.row_bytes + 2 * gains
    read = quantizer.read(values)
    if has_first:
        read[0, :FIRST], read[1, :2] = values[0, :FIRST], values[1, :2]
    angles = torch.arange(tokens)[:, None] * INV_FREQ
    rotated = rotate_pairs(read[..., RANK:], angles.cos(), angles.sin())
    expected = torch.cat((read if quantizer.correcting else read[..., :RANK], rotated), dim=-1)
    width = expected.shape[-1]
    torch.testing.assert_close(result[..., :width], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(result[..., width:], scales.half().float())


@pytest.mark.parametrize("has_first", [True, False])
def test_new_tokens_are_read_by_slots_as_among_all(quantizer, has_first):
    """A request of two pages, of which the second has no first tokens: their slots lie in the null page."""
    page, length, pages = 8, 13, torch.tensor([3, 1])
    values = torch.randn(length, RANK + 4)
    cache = torch.zeros(4, page, quantizer.format.row_bytes, dtype=torch.uint8)
    padded = torch.cat((values, values.new_zeros(2 * page - length, RANK + 4)))
    cache[pages] = rows_of(padded, quantizer).unflatten(0, (2, page))
    first = torch.full((4, FIRST, RANK + 4), torch.nan)
    first[2] = values[:FIRST]
    positions = torch.arange(length)
    of_first = torch.tensor([2, 0])
    slots, first_at = (
        torch.cat((of[positions // page] * page + positions % page, torch.tensor([-1]))) for of in (pages, of_first)
    )
    with NoHostSync():
        small = first_slots(first_at, page, FIRST)
        got = values_at(slots, cache, quantizer, *((small, first) if has_first else (None, None)))
    exact = first[2:3] if has_first else None
    expected = vectors_of(cache[pages].flatten(0, 1)[None], quantizer, None, exact, torch.tensor([length]))
    assert torch.equal(got[:length], expected[0, :length, : RANK + 4])


def test_slots_of_first_tokens_in_their_smaller_pages():
    slots = torch.tensor([-1, 0, 3, 4, 31, 32, 35, 36, 64 + 2])
    assert first_slots(slots, 32, 4).tolist() == [-1, 0, 3, -1, -1, 4, 7, -1, 10]
    assert first_slots(torch.tensor([-1, 5]), 4, 4).tolist() == [-1, 5]


def entry(runs, first=FIRST) -> QuantizedLatentEntry:
    rank = TokenFormat(runs).channels
    names = {"rope_inv_freq": (1.0, 0.1), "key_norm_eps": None, "latent_runs": runs, "rope_runs": ROPE}
    return QuantizedLatentEntry(kv_lora_rank=rank, first_tokens=first, **names)


def low_rank(runs, shared_rank=0) -> QuantizedLowRankEntry:
    blocks = (Block(TokenFormat(runs).channels, (0, 1), (0, 1)),)
    shared = {"shared_layers": int(shared_rank > 0), "shared_rank": shared_rank}
    return QuantizedLowRankEntry(blocks=blocks, latent_runs=runs, first_tokens=FIRST, **shared)


def test_layers_of_a_cascade_have_rows_of_their_own_latents():
    layout = RowLayout.of([low_rank(LATENT), low_rank((("8", 4),), RANK)], CONFIG, 4, 16)
    assert layout.rows == (4, 4) and layout.first == (FIRST * 12 * 4, FIRST * 4 * 4)
    assert layout.page == 32 and layout.rows_of(1) == slice(128, 256)


def test_a_block_ends_with_memory_for_unpacked_tokens():
    layers = [entry(LATENT), entry((("8", 4),))]
    layout = RowLayout.of(layers, CONFIG, 2, 16, unpacked=16 * 2)
    assert layout.token_bytes == 6 + 6 + 32 and layout.unpacked == 32
    assert layout.unpacked_of() == slice(layout.page * 12, layout.page * 44)
    assert layout.rows_of(1).stop == layout.unpacked_of().start
    assert RowLayout.of([entry(LATENT, 0)], CONFIG, 2, 4, unpacked=32).unpacked == 0  # 24 bytes of rows before it


def test_layers_fill_a_block_and_leave_nothing_between():
    layers = [entry(LATENT), entry((("8", 4),)), entry(LATENT)]
    layout = RowLayout.of(layers, CONFIG, 4, 16)
    assert layout.rows == (6, 6, 6) and layout.first == (FIRST * 16 * 4, FIRST * 8 * 4, FIRST * 16 * 4)
    assert layout.page == 48  # 640 bytes of first tokens, rows of 18 bytes
    slices = [layout.rows_of(layer) for layer in range(3)]
    assert [(each.start, each.stop) for each in slices] == [(0, 288), (288, 576), (576, 864)]
    assert layout.first_of(2).stop == sum(layout.first) <= layout.page * layout.token_bytes
    assert RowLayout.of(layers, CONFIG, 2, 16).page == 32
    assert RowLayout.of(layers, CONFIG, 2, 128).page == 128
    assert RowLayout.of([entry(LATENT, 0)], CONFIG, 2, 16).page == 16
    assert RowLayout.of([entry(LATENT, 40)], CONFIG, 1, 8).page >= 40
