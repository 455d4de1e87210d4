"""The parts of hybrid caches themselves, their predicted bytes, and the peak and the share of attention as measured."""

from functools import partial

import own_models as own
import pytest
import torch
from own_models import hybrid_entry, hybrid_model, tiny_source, tokens
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from surgery.eval.kv_cache import cache_bytes
from surgery.eval.kv_flow import measure_footprint, measure_peak
from surgery.eval.tensor_bytes import plain_tensors, storage_bytes
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.model.hybrid_cache import HybridLayer, StreamingLayer
from surgery.model.left_padding import set_padding
from surgery.model.plain_cache import PlainLayer
from surgery.model.sink_window_cache import SinkWindowLayer

INT8 = {"format": "int8", "group": 8, "window": 4, "keys": "channel"}


def hybrid(family="llama", **overrides) -> SurgeryForCausalLM:
    entries = [hybrid_entry(1, [1, 0], sinks=2, recent=9), hybrid_entry(0, [0, 1], sinks=1, recent=5)]
    return hybrid_model(tiny_source(family), entries, **overrides)


def full_and_stock(**overrides) -> SurgeryForCausalLM:
    return hybrid_model(tiny_source("llama"), [hybrid_entry(2, [1, 0]), None], **overrides)


MODELS = {
    "hybrid": hybrid,
    "hybrid, int8": partial(hybrid, kv_cache=INT8),
    "hybrid, int8 and int2": partial(hybrid, kv_cache=INT8 | {"streaming_format": "int2", "group": 4}),
    "full and stock": full_and_stock,
    "latent": lambda: own.lossless_streaming_latent(tiny_source("qwen3"), 2, 9),
    "low rank": lambda: own.lossless_low_rank(tiny_source("llama"), own.streaming_blocks_entries(2, 9)),
    "window": lambda: own.lossless_window(tiny_source("llama")),
    "low rank alone": lambda: own.lossless_low_rank(tiny_source("llama"), kv_cache=INT8 | {"keys": "token"}),
    "sliding": lambda: own.lossless_model(tiny_source("qwen2")),
}


@pytest.mark.parametrize(
    ("make", "batch", "dtype"),
    [(hybrid, 1, torch.float32), *((make, 4, torch.bfloat16) for make in MODELS.values())],
    ids=["hybrid, one row", *MODELS],
)
def test_live_bytes_are_those_predicted(make, batch, dtype):
    model = make().to(dtype)
    cache, records, sizes = DynamicCache(config=model.config), 0, (1, 3, 7, 1, 20, 1, 1)
    if layers := model.cache_layers():
        cache = Cache(layers=layers)
        for layer in layers:
            layer.reserve(sum(sizes))
    for size in sizes:
        cache = model(tokens(batch, size), past_key_values=cache).past_key_values
        records += size
        assert cache_bytes(cache) == model.kv_cache_bytes(batch, records)
    values = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in plain_tensors(cache)}
    if not any(type(layer).__name__ == "DynamicSlidingWindowLayer" for layer in cache.layers):
        # Of full-precision tokens there are fewer than have memory, until the next group of them is quantized.
        quantized = getattr(model.config, "kv_cache", None)
        exact = quantized["group"] + quantized["window"] if quantized else 0
        spare = batch * own.LAYERS * 2 * own.LATENT * exact * dtype.itemsize
        assert 0 <= sum(values.values()) - cache_bytes(cache) <= spare, "a view keeps more memory alive than it shows"


def peak_of(model, prompt: int, chunk: int, steps: int) -> int:
    """The definition of `measure_peak`, from outside."""
    cache, peak = DynamicCache(config=model.config), 0
    model(tokens(1, 1), past_key_values=cache)  # makes the layers
    cache.reset()
    for layer in cache.layers:
        if not isinstance(layer, HybridLayer | SinkWindowLayer) and not layer.get_seq_length() == 0:
            raise AssertionError("not empty")

    def watch(part):
        update = part.update

        def watched(*args, **kwargs):
            nonlocal peak
            returned = update(*args, **kwargs)
            sizes = [tensor for tensor in plain_tensors(cache) if tensor.ndim > 0]
            peak = max(peak, storage_bytes([*sizes, *returned]))
            return returned

        part.update = watched

    for layer in cache.layers:
        for part in layer.parts if isinstance(layer, HybridLayer) else [layer]:
            watch(part)
    for piece in [
        *tokens(1, prompt).split(chunk, dim=1),
        *tokens(1, max(1, steps))[:, :steps].split(1, dim=1),
    ]:
        if piece.shape[1]:
            model(piece, past_key_values=cache)
    return peak


@pytest.mark.parametrize(
    ("name", "prompt", "chunk", "steps"),
    [
        *((name, 40, 7, 12) for name in MODELS),
        *((name, 3, 2, 1) for name in ("hybrid", "latent", "low rank", "window")),  # less than a window
    ],
)
def test_the_peak_is_as_defined(name, prompt, chunk, steps, monkeypatch):
    monkeypatch.setattr("surgery.model.hybrid_cache.PIECE", 1)  # pieces of sinks + recent tokens
    model = MODELS[name]()
    assert measure_peak(model, prompt, steps, chunk) == peak_of(model, prompt, chunk, steps)


def test_pieces_bound_the_peak():
    """A prompt in one chunk costs no more than the window and one piece beyond what stays."""
    model = hybrid_model(tiny_source("llama"), [hybrid_entry(0, [0, 1], sinks=4, recent=60)] * own.LAYERS)
    entries, piece = 63, 256
    token = 2 * 2 * own.HEAD_DIM * 4
    assert measure_peak(model, 1000, 1) == token * (2 * entries + entries + piece)


SEEN = []


def counting_attention(module, query, key, value, attention_mask, **kwargs):
    """sdpa that notes how many pairs of a query of a head and a key its mask lets through."""
    mask = attention_mask
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    SEEN.append(int(mask.expand(*query.shape[:3], key.shape[2]).sum()))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


@pytest.mark.parametrize("name", [name for name in MODELS if "int" not in name and "fp8" not in name])
@pytest.mark.parametrize(("prompt", "chunk", "steps"), [(40, 40, 3), (40, 7, 1), (4, 4, 2)])
def test_the_footprint_is_counted_in_the_masks(name, prompt, chunk, steps):
    model = MODELS[name]()
    footprint = measure_footprint(model, prompt, steps)
    AttentionInterface.register("counting", counting_attention)
    AttentionMaskInterface.register("counting", sdpa_mask)
    model.set_attn_implementation("counting")
    SEEN.clear()
    cache = None
    for piece in (*tokens(1, prompt).split(chunk, dim=1), *[tokens(1, 1)] * steps):
        cache = model(piece, past_key_values=cache).past_key_values
    total = prompt + steps
    causal = own.LAYERS * model.config.num_attention_heads * total * (total + 1) / 2
    assert footprint == pytest.approx(sum(SEEN) / causal, abs=1e-12)


def test_layers_are_built_for_a_new_cache_only(monkeypatch):
    model, built = hybrid(), []
    cache = model(tokens()).past_key_values
    original = SurgeryConfig.quantized_layer
    monkeypatch.setattr(SurgeryConfig, "quantized_layer", lambda *args: built.append(1) or original(*args))
    monkeypatch.setattr("surgery.model.compact_caches.new_layer", lambda *args, **kwargs: built.append(1))
    model(tokens()[:, :1], past_key_values=cache)
    assert not built


def test_a_cache_of_another_form_is_refused():
    model = hybrid()
    entries = [hybrid_entry(1, [1, 0])] * 2
    for other in (full_and_stock(), hybrid(kv_cache=INT8), hybrid_model(tiny_source("llama"), entries)):
        with pytest.raises(ValueError, match="cannot continue"):
            model(tokens(), past_key_values=other(tokens()).past_key_values)
    twin = hybrid()
    cache = twin(tokens()).past_key_values
    assert model(tokens(), past_key_values=cache).past_key_values.get_seq_length() == 24


def test_rows_are_repeated_reordered_and_selected():
    model = hybrid(kv_cache=INT8 | {"streaming_format": "int2"})
    ids = tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    cache = model(ids, attention_mask=mask).past_key_values
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 0, 1]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    direct = model(ids[[1, 0]], attention_mask=mask[[1, 0]]).past_key_values
    assert [layer.padding.tolist() for layer in cache.layers] == [[4, 0], [4, 0]]
    assert torch.equal(
        model(ids[:, :3], past_key_values=cache).logits, model(ids[:, :3], past_key_values=direct).logits
    )


def test_reset_crop_and_update_of_the_whole():
    model = hybrid()
    cache = model(tokens()).past_key_values
    with pytest.raises(ValueError, match="be cropped"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="attention updates its parts"):
        cache.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)
    assert cache.layers[0].get_mask_sizes(3) == (15, 0) and cache.get_seq_length() == 12
    cache.reset()
    assert cache_bytes(cache) == 0 and cache.get_seq_length() == 0 and not cache.layers[0].is_initialized
    assert torch.equal(model(tokens(), past_key_values=cache).logits, model(tokens()).logits)
    with pytest.raises(ValueError, match="needs full or streaming heads"):
        HybridLayer(None, None)


def test_padding_is_known_once_every_row_has_a_token():
    layer = HybridLayer(PlainLayer(), StreamingLayer(1, 3))
    cache = DynamicCache()
    cache.layers = [layer]
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    keys = torch.randn(2, 1, 5, 4)
    for stop, padding in ((2, [0, 2]), (4, [0, 3])):
        assert set_padding(cache, mask[:, :stop]) is layer.padding and layer.padding.tolist() == padding
        layer.streaming.update(keys[:, :, stop - 2 : stop], keys[:, :, stop - 2 : stop])
        layer.full.update(keys[:, :, stop - 2 : stop], keys[:, :, stop - 2 : stop])
    assert set_padding(cache, mask) is None and layer.padding.tolist() == [0, 3]
