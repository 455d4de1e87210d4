"""Baselines made cheaper: whatever calls the model, it is the cheaper one."""

import pytest
import torch
from measures import mean_loss
from quantized_caches import quantized_cache
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.logits import LogitReader
from surgery.eval.variants.cache_hook import NoVariant
from surgery.eval.variants.quantized_kv import quantize_kv
from surgery.eval.variants.sink_window import sink_window
from surgery.model.quantized_cache import QuantizedKVLayer

VARIANTS = {"int4": lambda model: quantize_kv(model, "int4", 16), "window": lambda model: sink_window(model, 3, 9)}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def load(checkpoints):
    def model_of(name="llama", attention="sdpa"):
        return AutoModelForCausalLM.from_pretrained(checkpoints(name), attn_implementation=attention).eval()

    return model_of


def tokens_of(batch=2, length=40, seed=0):
    return torch.randint(3, 4096, (batch, length), generator=torch.Generator().manual_seed(seed))


def decoded(model, tokens, sizes, **kwargs):
    """Logits of `tokens` fed in chunks of `sizes`, and the cache."""
    cache, parts, first = None, [], 0
    for size in sizes:
        part = {name: value[:, : first + size] for name, value in kwargs.items() if name == "attention_mask"}
        part |= {name: value[:, first : first + size] for name, value in kwargs.items() if name == "position_ids"}
        output = model(tokens[:, first : first + size], past_key_values=cache, use_cache=True, **part)
        cache, first = output.past_key_values, first + size
        parts.append(output.logits)
    return torch.cat(parts, dim=1), cache


def window_mask(padding, length, sinks, recent):
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    first = torch.tensor(padding).view(-1, 1, 1)
    records = (key <= query) & (key >= first) & ((query - key < recent) | (key - first < sinks))
    return (records | (query == key))[:, None]


@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "eager"), *((name, "sdpa") for name in ("llama", "qwen2", "qwen3", "mistral"))]
)
def test_window_is_full_attention_with_its_mask_however_it_is_fed(load, name, attention):
    model, tokens, padding = load(name, attention), tokens_of(3), [0, 2, 14]
    real = torch.arange(40) >= torch.tensor(padding)[:, None]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    mask = window_mask(padding, 40, 3, 9)
    if attention == "eager":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[real]
    full = model(tokens, attention_mask=real.long(), position_ids=positions, use_cache=False).logits[real]
    assert (full - expected).abs().max() > 0.1
    sink_window(model, 3, 9)
    inputs = {"attention_mask": real.long(), "position_ids": positions}
    plain = model(tokens, **inputs, use_cache=False).logits[real]
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-5)
    for sizes in ([40], [1] * 40, [5, 1, 1, 25, 8]):
        logits, _ = decoded(model, tokens, sizes, **inputs)
        torch.testing.assert_close(logits[real], expected, rtol=1e-5, atol=1e-5)


def test_window_of_a_batch_padded_on_the_right(load):
    model, tokens = sink_window(load(), 3, 9), tokens_of(2)
    alone = model(tokens[:1, :30], use_cache=False).logits
    mask = torch.ones_like(tokens)
    mask[0, 30:] = 0
    together = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(together[:1, :30], alone, rtol=1e-5, atol=1e-5)
    with pytest.raises(SurgeryError, match="left"):
        model(tokens, attention_mask=mask, use_cache=True)


def test_decoding_without_a_mask_remembers_the_padding(load):
    model, tokens = sink_window(load(), 3, 9), tokens_of(2)
    real = (torch.arange(40) >= torch.tensor([[0], [6]])).long()
    expected = model(tokens, attention_mask=real, use_cache=False).logits
    # Short enough that some of the padding is still in the window, and the second row's sinks are not complete.
    cache = model(tokens[:, :12], attention_mask=real[:, :12]).past_key_values
    logits = model(tokens[:, 12:], past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 12:], rtol=1e-5, atol=1e-5)


NEAR = {"int8": (1e-6, 0.08), "fp8": (0.01, 0.3), "int4": (0.02, 0.7)}


@pytest.mark.parametrize(
    ("name", "form"), [*(("llama", form) for form in NEAR), ("qwen3", "int4"), ("mixtral", "int4")]
)
def test_quantized_logits_are_near_the_source(load, name, form):
    tokens, (least, limit) = tokens_of(2, 64), NEAR[form]
    exact = load(name)(tokens, use_cache=False).logits
    logits = quantize_kv(load(name), form)(tokens, use_cache=False).logits
    assert least < (logits - exact).norm() / exact.norm() < limit


def test_quantized_decoding_is_a_cache_given_by_hand(load):
    model, tokens = load(), tokens_of(2, 50)
    sizes = [20] + [1] * 30
    cache, parts, first = quantized_cache("int4", 16, 5), [], 0
    for size in sizes:
        parts.append(model(tokens[:, first : first + size], past_key_values=cache).logits)
        first += size
    logits, live = decoded(quantize_kv(model, "int4", 16, 5), tokens, sizes)
    assert torch.equal(logits, torch.cat(parts, dim=1))
    assert cache_bytes(live) == cache_bytes(cache)


@each_variant
def test_every_way_to_call_sees_the_variant(load, variant):
    tokens = tokens_of(2, 48)
    exact = load()(tokens, use_cache=False).logits
    model = variant(load())
    cached = model(tokens)
    plain = model(tokens, use_cache=False)
    assert (plain.logits - exact).abs().max() > 0.05
    torch.testing.assert_close(plain.logits, cached.logits, rtol=1e-5, atol=1e-5)
    assert plain.past_key_values is None and cached.past_key_values.get_seq_length() == 48
    body = model.base_model(input_ids=tokens, use_cache=False)
    assert not {"cache", "past_key_values"} & body.keys()
    assert torch.equal(model.lm_head(body.last_hidden_state), plain.logits)
    assert torch.equal(model.base_model(tokens, use_cache=False).last_hidden_state, body.last_hidden_state)
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens), use_cache=False).logits
    assert torch.equal(embedded, plain.logits)
    assert len(model(tokens, use_cache=False, return_dict=False)) == 1
    assert LogitReader(model, tokens).splits
    assert mean_loss(model, tokens) != mean_loss(load(), tokens)


@each_variant
def test_generate_in_all_its_modes(load, variant):
    model, prompt = variant(load()), tokens_of(2, 20)
    prompt[1, :6] = 2  # the tokenizer's padding
    mask = (prompt != 2).long()
    common = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8}
    greedy = model.generate(prompt, **common, do_sample=False)
    beams = model.generate(prompt, **common, num_beams=3, num_return_sequences=2, do_sample=False)
    sampled = model.generate(prompt, **common, do_sample=True)
    assert greedy.shape == sampled.shape == (2, 28) and beams.shape == (4, 28)
    tokens = model.generate(prompt, **common, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(tokens.sequences, greedy) and tokens.past_key_values.get_seq_length() == 27
    chunked = model.generate(prompt, **common, do_sample=False, prefill_chunk_size=7)
    assert chunked.shape == (2, 28)


def test_window_generates_the_same_with_and_without_a_cache_and_padding(load):
    model, prompt = sink_window(load(), 3, 9), tokens_of(2, 20)
    prompt[1, :6] = 2
    mask = (prompt != 2).long()
    common = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    cached = model.generate(prompt, attention_mask=mask, **common)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **common, use_cache=False), cached)
    assert torch.equal(model.generate(prompt, attention_mask=mask, **common, prefill_chunk_size=7), cached)
    assert torch.equal(model.generate(prompt[1:, 6:], **common)[0, 14:], cached[1, 20:])
    beams = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 3, "do_sample": False}
    together = model.generate(prompt, attention_mask=mask, **beams)
    assert torch.equal(together, model.generate(prompt, attention_mask=mask, **beams, use_cache=False))
    assert torch.equal(model.generate(prompt[1:, 6:], **beams)[0, 14:], together[1, 20:])


@each_variant
@pytest.mark.parametrize("configured", [False, True])
def test_an_empty_cache_of_the_caller_becomes_the_live_one(load, variant, configured):
    model, tokens = variant(load()), tokens_of(2, 48)
    expected, _ = decoded(model, tokens, [30, 18])
    mine = DynamicCache(config=model.config) if configured else DynamicCache()
    model(tokens[:, :30], past_key_values=mine)
    logits = model(tokens[:, 30:], past_key_values=mine).logits
    assert torch.equal(logits, expected[:, 30:]) and mine.get_seq_length() == 48
    mine.reset()
    assert torch.equal(model(tokens[:, :30], past_key_values=mine).logits, expected[:, :30])


@each_variant
def test_foreign_caches_are_refused(load, variant):
    tokens = tokens_of(2, 10)
    filled = load()(tokens).past_key_values
    model = variant(load())
    static, int8 = StaticCache(config=model.config, max_cache_len=64), quantize_kv(load(), "int8")
    for cache in (filled, static, int8(tokens).past_key_values, quantized_cache("int2")):
        with pytest.raises(SurgeryError, match="cannot continue"):
            model(tokens, past_key_values=cache)


@each_variant
def test_a_model_is_made_a_variant_once_and_not_of_windows(load, variant):
    model = variant(load())
    for again in VARIANTS.values():
        with pytest.raises(SurgeryError, match="the model already has"):
            again(model)
    with pytest.raises(NoVariant, match="sliding_attention"):
        variant(load("mistral_window"))
    if variant is VARIANTS["window"]:  # which needs full attention in every layer
        with pytest.raises(NoVariant, match="sliding_attention"):
            variant(load("qwen2_window"))


def test_impossible_requests_are_refused(load):
    model = load()
    for request in (
        lambda: quantize_kv(model, "int5"),
        lambda: sink_window(model, 0, 0),
        lambda: sink_window(load(attention="flex_attention"), 3, 9),
        lambda: quantize_kv(model.base_model, "int8"),
        lambda: sink_window(load(), 3, 9)(tokens_of(), attention_mask=torch.ones(2, 7)),
        lambda: sink_window(load(), 3, 9)(tokens_of(), attention_mask=torch.ones(2, 1, 40, 40)),
    ):
        with pytest.raises(SurgeryError):
            request()
    quantize_kv(model, "int8")  # what was refused left no hook


@pytest.mark.parametrize("batch", [1, 4])
def test_live_bytes_are_those_predicted(load, batch):
    size = dict(batch=batch, heads=2, tokens=128, key_dim=8, value_dim=8, dtype=torch.bfloat16)
    tokens = tokens_of(batch, 128)
    plain = cache_bytes(load().bfloat16()(tokens).past_key_values)
    assert plain == 2 * batch * 2 * 128 * 16 * 2
    for form, bits in {"int8": 12, "fp8": 10, "int4": 8, "int2": 6}.items():  # with the scales of groups of 8
        live = cache_bytes(quantize_kv(load().bfloat16(), form, 8)(tokens).past_key_values)
        assert live == 2 * QuantizedKVLayer(form, 8).predicted_bytes(**size) == plain * bits // 16
    live = cache_bytes(sink_window(load().bfloat16(), 4, 13)(tokens).past_key_values)
    assert live == plain // 8
