"""Shared caches: the tokens that they give back exactly, their contents, and the encoding of their stores."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surgery.eval.kv_cache import cache_bytes
from surgery.model.group_cache import GroupLayer, exact_tokens
from surgery.model.group_stores import MergedPairs, PromptBasis, SharedCodes, slerp

WIDTH = 4


def layer(block: int | None, sinks: int = 0, window: int = 0) -> GroupLayer:
    return GroupLayer(SharedCodes(1, WIDTH), 0, block, sinks, window)


def numbered(first: int, count: int) -> torch.Tensor:
    """Tokens [1, 1, count, WIDTH] that hold their own position."""
    return torch.arange(first, first + count).float()[None, None, :, None].expand(1, 1, count, WIDTH)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 7), st.lists(st.integers(1, 6), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_every_query_reads_each_slot_once_in_the_form_that_the_rule_says(block, sinks, window, pieces):
    cache, records = layer(block, sinks, window), 0
    ends = {*range(block, sum(pieces) + 1, block), *(sum(pieces[: i + 1]) for i in range(len(pieces)))}
    for end in sorted(ends):
        count = end - records
        reading = cache.reading(count, torch.device("cpu"))
        mask = torch.arange(end) <= torch.arange(records, end)[:, None]
        selection = reading.select(mask) if count > 1 else mask[:, reading.positions]
        exact, _ = cache.update(numbered(records, count), numbered(records, count)[..., :0])
        assert torch.equal(exact[0, 0, :, 0].long(), reading.exact)
        stored = cache.store.read(0, *reading.rebuilt) if reading.rebuilt[0] < reading.rebuilt[1] else exact[..., :0, :]
        assert torch.equal(stored[0, 0, :, 0].long(), torch.arange(*reading.rebuilt))
        is_exact = torch.arange(len(reading.positions)) >= len(reading.positions) - len(reading.exact)
        for row, query in enumerate(range(records, end)):
            read = {
                int(position): bool(e)
                for position, e, see in zip(reading.positions, is_exact, selection[row], strict=True)
                if see
            }
            start = query // block * block
            assert read == {n: n >= start or n > query - window or n < sinks for n in range(query + 1)}
            assert int(selection[row].sum()) == query + 1
        cache.settle(torch.clone)
        records = end
        assert cache.keys.shape[-2] == exact_tokens(records, block, sinks, window)
        size = {"batch": 1, "heads": 1, "key_dim": WIDTH, "value_dim": 0, "dtype": torch.float32}
        assert cache_bytes(cache) == cache.predicted_bytes(records, **size)


def test_an_additive_mask_is_chosen_from_too_and_pieces_end_where_blocks_do():
    cache = layer(4, window=3)
    cache.update(numbered(0, 4), numbered(0, 4)[..., :0])
    cache.settle(lambda tokens: tokens)
    reading = cache.reading(3, torch.device("cpu"))
    visible = torch.arange(7) <= torch.arange(4, 7)[:, None]
    additive = torch.zeros(3, 7).masked_fill(~visible, torch.finfo(torch.float32).min)
    assert torch.equal(reading.select(additive) == 0, reading.select(visible))
    with pytest.raises(ValueError, match="cross the end of a block of 4"):
        layer(4).reading(5, torch.device("cpu"))


@pytest.mark.parametrize("wrong", [{"block": 0}, {"block": 4, "sinks": -1}, {"block": 4, "window": -1}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="block must be at least 1"):
        layer(**wrong)


def test_a_cache_that_is_reset_is_new_and_cannot_take_tokens_back():
    cache = layer(2, sinks=1)
    cache.update(numbered(0, 2), numbered(0, 2)[..., :0])
    cache.settle(lambda tokens: tokens)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.store.codes is None and cache_bytes(cache) == 0


def test_layers_must_write_in_their_order():
    with pytest.raises(ValueError, match="before layer 0"):
        SharedCodes(2, WIDTH).write(1, torch.zeros(1, 1, 2, WIDTH))
    with pytest.raises(ValueError, match="before layer 0"):
        PromptBasis(2, 2, 1, 1).write(1, torch.zeros(1, 1, 2, WIDTH))


def test_slerp_turns_by_a_share_of_the_angle():
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.5])
    merged, angle = slerp(x, y, 0.6)
    assert float(angle) == pytest.approx(math.pi / 2)
    expected = [math.cos(0.6 * math.pi / 2), math.sin(0.6 * math.pi / 2)]
    assert merged.tolist() == pytest.approx(expected)
    same, none = slerp(x, 2 * x, 0.6)
    assert same.tolist() == pytest.approx([1, 0]) and float(none) == pytest.approx(0, abs=1e-3)
    assert float(slerp(x, torch.zeros(2), 0.6)[1]) == 0


def test_merged_pairs_keep_norms_and_the_tokens_of_the_widest_angle():
    first, second = (torch.randn(2, 1, 8, 12, generator=torch.Generator().manual_seed(i)) for i in range(2))
    store = MergedPairs(heads=2, key_width=4, block=4, kept=1, interpolation=0.6)
    for part in (slice(0, 4), slice(4, 8)):
        store.write(0, first[..., part, :])
        store.write(1, second[..., part, :])
    for span in (slice(0, 4), slice(4, 12)):
        a, b = (x[..., span].unflatten(-1, (2, -1)) for x in (first, second))
        widest = slerp(a, b, 0.6)[1].mean(-1).unflatten(-1, (2, 4)).argmax(-1)  # [B, 1, blocks]
        for index, exact in enumerate((a, b)):
            read = store.read(index, 0, 8)[..., span].unflatten(-1, (2, -1))
            assert torch.allclose(read.norm(dim=-1), exact.norm(dim=-1), atol=1e-5)
            same = torch.isclose(read, exact, atol=1e-6).all(-1).all(-1).unflatten(-1, (2, 4))
            assert torch.equal(same.int().argmax(-1), widest) and (same.sum(-1) == 1).all()
    assert torch.equal(store.read(1, 2, 7), store.read(1, 0, 8)[..., 2:7, :])
    assert cache_bytes(store) == 2 * (4 * store.numbers(8, 12) + store.index_bytes(8))
