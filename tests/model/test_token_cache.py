"""A cache of packed rows gives what one pass gives, however it was filled, cropped and padded."""

import pytest
import torch
from own_models import tokens
from written_models import WRITTEN


@pytest.fixture(scope="module", params=["rows_latent_predicted", "rows_latent_key_norm", "rows_heads", "rows_shared"])
def model(request):
    return WRITTEN[request.param]()


def logits(model, ids, cache=None, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, use_cache=True, **kwargs)


def agree(result, expected):
    # A product of another shape may round a value over the edge of a step.
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 7], [1, 3, 8]])
def test_any_chunks(model, chunks):
    ids, cache, parts = tokens(), None, []
    for part in ids.split(chunks, dim=1):
        out = logits(model, part, cache)
        cache = out.past_key_values
        parts.append(out.logits)
    with torch.no_grad():
        agree(torch.cat(parts, dim=1), model(ids, use_cache=False).logits)


@pytest.mark.parametrize("entries", [1, 6, 11])
def test_cropped_tokens_come_again(model, entries):
    ids = tokens()
    whole = logits(model, ids)
    cache = logits(model, torch.cat([ids[:, :entries], ids.flip(1)[:, : 12 - entries]], dim=1)).past_key_values
    cache.crop(entries - 12)
    assert cache.get_seq_length() == entries
    agree(logits(model, ids[:, entries:], cache).logits, whole.logits[:, entries:])


@pytest.mark.parametrize("chunks", [[15], [2, 13], [4, 1, 10]])
def test_first_tokens_are_those_after_the_padding(model, chunks):
    ids, rows = tokens(), []
    expected = logits(model, ids).logits
    padded = torch.zeros(2, 15, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, padding in enumerate((3, 1)):
        padded[row, padding : padding + 12], mask[row, padding : padding + 12] = ids[row], 1
    padded[1, 13:], mask[1, 13:] = 5, 1  # two tokens more
    cache, start = None, 0
    for part in padded.split(chunks, dim=1):
        start += part.shape[1]
        out = logits(model, part, cache, attention_mask=mask[:, :start])
        cache = out.past_key_values
        rows.append(out.logits)
    result = torch.cat(rows, dim=1)
    agree(result[0, 3:], expected[0])
    agree(result[1, 1:13], expected[1])


def test_assisted_decoding_and_beams_give_the_tokens_of_plain_decoding(model):
    ids = tokens()[:1]
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), plain)
    beams = model.generate(ids.expand(2, -1), num_beams=2, **settings | {"attention_mask": None})
    assert torch.equal(beams[0], beams[1])


def test_memory_that_is_reserved_stays_where_it_is(model):
    cache = model.reserved_cache(12)
    logits(model, tokens()[:, :3], cache)
    address = cache.layers[0].keys.data_ptr()
    logits(model, tokens()[:, 3:], cache)
    assert cache.layers[0].keys.data_ptr() == address
