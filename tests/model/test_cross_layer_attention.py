"""Layers that share a cache are a function of the text, in every family, whatever pieces the text comes in."""

import copy
from functools import partial

import pytest
import torch
from own_models import FULL_ATTENTION, tiny_source, tokens
from shared_caches import FORMS, LAYERS, PAIRS, PROMPT, STATIC, WIDTH, shared
from transformers import DynamicCache, StaticCache

from surgery.eval.kv_cache import cache_bytes
from surgery.model import SurgeryConfig, SurgeryForCausalLM, register
from surgery.model.attention_functions import SCALED_QUERIES

register()


FAMILIES = [family for family in FULL_ATTENTION if family not in SCALED_QUERIES]
text = partial(tokens, length=23)


def agree(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert float((actual - expected).abs().max() / expected.abs().max()) < tolerance


@pytest.fixture(params=FORMS)
def form(request) -> dict:
    return FORMS[request.param]


@pytest.fixture
def model(form) -> SurgeryForCausalLM:
    return shared(tiny_source("llama"), form)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_basis_of_full_rank_is_the_source(family):
    source = tiny_source(family)
    model = shared(source, {**STATIC, "rank": LAYERS * WIDTH})
    mixing = torch.linalg.qr(torch.randn(LAYERS * WIDTH, LAYERS * WIDTH))[0]
    for index, layer in enumerate(model.model.layers):
        part = mixing[:, index * WIDTH : (index + 1) * WIDTH]
        layer.self_attn.basis_down.copy_(part)
        layer.self_attn.basis_up.copy_(part.T)
    agree(model(text()).logits, source(text()).logits)


@pytest.mark.parametrize("pieces", [(5, *[1] * 18), (1, 2, 9, 11)], ids=["decode", "chunks"])
def test_every_way_to_feed_a_text_gives_the_same(model, pieces):
    expected = model(text(), use_cache=False)
    assert expected.past_key_values is None
    cache = DynamicCache(config=model.config)
    results = [model(piece, past_key_values=cache).logits for piece in text().split(pieces, dim=1)]
    agree(torch.cat(results, dim=1), expected.logits)
    assert cache_bytes(cache) == model.kv_cache_bytes(2, 23)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_what_it_reads_at_once(family):
    model = shared(tiny_source(family), STATIC)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        logits = model(text()).logits
        cache = DynamicCache(config=model.config)
        pieces = text().split((6, *[1] * 17), dim=1)
        agree(torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], dim=1), logits)


def test_the_shared_form_is_really_read():
    """Another basis is another function, but not before a block is complete."""
    source = tiny_source("llama")
    a, b = (shared(source, STATIC, scale)(text()).logits for scale in (0.1, 0.3))
    agree(a[:, :4], b[:, :4])
    assert float((a[:, 4:] - b[:, 4:]).abs().max()) > 1e-2


def test_left_padding_shifts_nothing_but_blocks(model, form):
    """Rows with a whole block of padding are the rows without; all sinks would be padding, so there are none."""
    if form["sinks"]:
        pytest.skip("sinks are cache positions")
    shift = 2 * form["block"]
    padded = torch.cat([torch.zeros(2, shift, dtype=torch.long), text()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= shift).long().expand(2, -1)
    agree(model(padded, attention_mask=mask).logits[:, shift:], model(text()).logits)
    alone = model.generate(text(), max_new_tokens=6, do_sample=False, eos_token_id=None)
    batched = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(alone[:, 23:], batched[:, 23 + shift :])


@pytest.mark.parametrize("chunk", [None, 5])
def test_greedy_generation_is_the_argmax_of_one_pass(model, chunk):
    options = {} if chunk is None else {"prefill_chunk_size": chunk, "disable_compile": True}
    tokens = model.generate(text(), max_new_tokens=6, do_sample=False, eos_token_id=None, **options)
    logits = model(tokens).logits
    assert torch.equal(tokens[:, 23:], logits[:, 22:-1].argmax(-1))


def test_beams_are_scored_as_one_pass_scores_them(model):
    how = {"max_new_tokens": 7, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    tokens = model.generate(text(), **how, return_dict_in_generate=True, output_scores=True)
    logits = model(tokens.sequences).logits[:, 22:-1].log_softmax(-1)
    scores = logits.gather(-1, tokens.sequences[:, 23:, None])[..., 0].sum(-1) / 7
    assert torch.allclose(scores, tokens.sequences_scores, atol=1e-4)


def test_a_basis_of_the_prompt_reads_the_prompt_exactly_and_compresses_it_afterwards():
    source = tiny_source("qwen3")
    lossless, coarse = (shared(source, PROMPT | {"key_rank": r, "value_rank": r}) for r in (32, 2))
    agree(coarse(text()).logits, source(text()).logits)
    for model, exact in ((lossless, True), (coarse, False)):
        cache = DynamicCache(config=model.config)
        results = [model(piece, past_key_values=cache).logits for piece in text().split((15, 3, 5), dim=1)]
        error = (torch.cat(results, dim=1) - source(text()).logits).abs().max() / source(text()).logits.abs().max()
        assert (error < 2e-5) == exact
        assert cache_bytes(cache) == model.kv_cache_bytes(2, 23, prompt=15)


def test_layers_outside_groups_keep_their_own_cache():
    source = tiny_source("llama")
    config = copy.deepcopy(source.config)
    config.num_hidden_layers, config.layer_types = 3, None
    model = SurgeryForCausalLM(
        SurgeryConfig.from_base(config, [None, {**PAIRS, "index_in_group": 0}, {**PAIRS, "index_in_group": 1}])
    ).eval()
    cache = DynamicCache(config=model.config)
    results = [model(piece, past_key_values=cache).logits for piece in text().split((9, *[1] * 14), dim=1)]
    agree(torch.cat(results, dim=1), model(text()).logits)
    assert cache_bytes(cache) == model.kv_cache_bytes(2, 23)


def test_hidden_states_are_joined_and_attentions_refused(model):
    outputs = model(text(), output_hidden_states=True)
    assert [state.shape for state in outputs.hidden_states] == [(2, 23, 32)] * (LAYERS + 1)
    agree(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
    with pytest.raises(ValueError, match="attentions"):
        model(text(), output_attentions=True)


def test_trains():
    model = shared(tiny_source("llama"), STATIC)
    with torch.enable_grad():
        model(text(), labels=text()).loss.backward()
    for layer in model.model.layers:
        assert layer.self_attn.basis_down.grad.abs().sum() > 0 and layer.self_attn.basis_up.grad.abs().sum() > 0


def test_other_caches_and_prepared_masks_are_refused(model):
    full = DynamicCache(config=model.config)
    full.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    for cache in (StaticCache(config=model.config, max_cache_len=32), full):
        with pytest.raises(ValueError, match="cannot continue"):
            model(text(1), past_key_values=cache)
    with pytest.raises(ValueError, match="need a 2D attention_mask"):
        model(text(), attention_mask=torch.zeros(2, 1, 23, 23))
    with pytest.raises(ValueError, match="needs their cache"):
        model.model.layers[0].self_attn(torch.zeros(1, 4, 32))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{**STATIC, "index_in_group": 0}, None], "its group must have 2 adjacent layers"),
        ([{**STATIC, "index_in_group": 0}, {**STATIC, "index_in_group": 1, "rank": 5}], "equal entries"),
        ([{**STATIC, "index_in_group": i, "rank": 0} for i in (0, 1)], "ranks and block"),
        ([{**STATIC, "index_in_group": i, "window": -1} for i in (0, 1)], "must be at least 0"),
        ([{**PAIRS, "group_size": 1, "index_in_group": 0}] * 2, "group_size must be 2"),
        ([{**STATIC, "group_size": 1, "block": b, "index_in_group": 0} for b in (2, 4)], "must have the same block"),
    ],
)
def test_groups_that_make_no_sense_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        SurgeryConfig.from_base(tiny_source("llama").config, entries)


def test_sliding_windows_are_refused():
    with pytest.raises(ValueError, match="full attention"):
        shared(tiny_source("mistral"), STATIC)
