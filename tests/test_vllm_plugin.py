"""The plugin for vLLM, as far as it runs without vLLM; tests/engines runs it in vLLM."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from no_host_sync import NoHostSync

from surgery.model.grouped_entry import GroupedEntry
from surgery.model.latent_entry import LatentEntry
from surgery.model.low_rank_entry import Block
from surgery_vllm import config as plugin_config
from surgery_vllm import paged, spans
from surgery_vllm.block_sizes import WASTED, block_sizes
from surgery_vllm.paged import gathered, latent_attention, paged_head_attention, rebuilt_attention, write_slots
from surgery_vllm.spans import Span, alike, num_leading_steps, spans_of
from surgery_vllm.structure import attention_of_layers

RANK, ROPE, HEADS, PAGE = 6, 4, 6, 8


def span_of(table, lengths, new, exact=True):
    """Requests of which the host knows the lengths, or bounds only."""
    longest = max(lengths) if exact else PAGE * table.shape[1]
    bounds = (min(lengths) if exact else new, longest)
    return Span(slice(None), table[:, : -(-longest // PAGE)].long(), torch.tensor(lengths), PAGE, new, *bounds)


def dense(query, vectors, scale, gains):
    """One request without pages: query [T, H, w], vectors [S, w (+ G)], gains [S, H]."""
    scores = torch.einsum("thw,sw->hts", query, vectors[:, : query.shape[-1]]) * scale * gains.T[:, None]
    later = torch.ones(len(query), len(vectors), dtype=torch.bool).triu(len(vectors) - len(query) + 1)
    return torch.einsum("hts,sr->thr", scores.masked_fill(later, -torch.inf).softmax(-1), vectors[:, :RANK])


@pytest.mark.parametrize(("lengths", "scores"), [((5, 17, 40), 500), ((1, 8), 2**20)])
@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("gains", [0, 2, 3])
@pytest.mark.parametrize("exact", [True, False])
def test_pages_change_nothing(lengths, new, scores, gains, exact, monkeypatch):
    monkeypatch.setattr(paged, "SCORES", scores)
    monkeypatch.setattr(paged, "KEY_STEP", 4)
    lengths = [max(length, new) for length in lengths]
    torch.manual_seed(0)
    width = RANK + ROPE + gains
    cache = torch.full((20, PAGE, width), 1e3, dtype=torch.float64)  # what no request wrote would be seen
    free = iter(torch.randperm(20).tolist())
    table = torch.zeros(len(lengths), 6, dtype=torch.int32)
    rows = [torch.randn(length, width, dtype=torch.float64) for length in lengths]
    for request, vectors in enumerate(rows):
        for number, piece in enumerate(vectors.split(PAGE)):
            table[request, number] = next(free)
            cache[table[request, number], : len(piece)] = piece
    query = torch.randn(len(lengths) * new, HEADS, RANK + ROPE, dtype=torch.float64)
    span = span_of(table, lengths, new, exact)
    with NoHostSync():
        result = latent_attention(query, gathered(cache, span.pages), span, RANK, 0.7)
    expected = []
    for q, vectors in zip(query.split(new), rows, strict=True):
        scaled = vectors[:, RANK + ROPE :] if gains else torch.ones(len(vectors), 1)
        expected.append(dense(q, vectors, 0.7, scaled.repeat_interleave(HEADS // scaled.shape[1], dim=1)))
    expected = torch.cat(expected)
    torch.testing.assert_close(result, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("lengths", "new", "tile"), [((5, 17, 40), 5, 2), ((5, 17, 40), 1, 512), ((1, 8), 5, 512)])
@pytest.mark.parametrize(("sinks", "recent"), [(0, None), (0, 1), (3, 9), (8, 16), (60, 1)])
@pytest.mark.parametrize("exact", [True, False])
def test_heads_see_sinks_and_a_window(lengths, new, tile, sinks, recent, exact, monkeypatch):
    """Pages that no query sees are not there."""
    monkeypatch.setattr(paged, "QUERY_TILE", tile)
    lengths = [max(length, new) for length in lengths]
    torch.manual_seed(0)
    cache = torch.full((20, 2, PAGE, 2 * RANK), 1e3, dtype=torch.float64)
    free = iter(torch.randperm(19).tolist())
    table = torch.full((len(lengths), 6), 19)
    query = torch.randn(len(lengths) * new, HEADS, RANK, dtype=torch.float64)
    expected = []
    for request, (length, q) in enumerate(zip(lengths, query.split(new), strict=True)):
        rows = torch.randn(2, length, 2 * RANK, dtype=torch.float64)
        at, own = torch.arange(length), torch.arange(length - new, length)[:, None]
        records = (at <= own) & ((own - at < (recent or length)) | (at < sinks))
        for number, piece in enumerate(rows.split(PAGE, dim=1)):
            if records[:, number * PAGE : (number + 1) * PAGE].any():
                table[request, number] = next(free)
                cache[table[request, number], :, : piece.shape[1]] = piece
        keys, values = rows.repeat_interleave(HEADS // 2, dim=0).split(RANK, dim=-1)
        scores = (torch.einsum("thd,hsd->hts", q, keys) * 0.7).masked_fill(~records, -torch.inf)
        expected.append(torch.einsum("hts,hsd->thd", scores.softmax(-1), values))
    span = span_of(table, lengths, new, exact)
    with NoHostSync():
        result = paged_head_attention(query, cache, span, 0.7, sinks, recent)
    torch.testing.assert_close(result, torch.cat(expected), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_rebuilt_heads_are_read_like_cached_ones(new, exact, blocks):
    """A new token reads means of latents where there is one block; five tokens read values."""
    torch.manual_seed(0)
    cache, span = torch.randn(6, PAGE, 4 * RANK), span_of(torch.randperm(6).view(2, 3), [7, 20], new, exact)
    query, up = torch.randn(2 * new, HEADS, RANK), torch.randn(2, RANK, 4 * RANK)
    calls = []

    def keys_of(latents, positions):
        return (latents * positions.view(2, -1, 1).cos()).unsqueeze(1)[..., :RANK].expand(-1, 2, -1, -1)

    def values_of(latents):
        calls.append("values")
        return torch.einsum("bsr,gdr->bgsd", latents, up)

    def of_means(means):
        calls.append("means")
        return torch.einsum("ngqr,gdr->ngqd", means.unflatten(1, (2, -1)), up).flatten(1, 2)

    with NoHostSync():
        latents = gathered(cache, span.pages)
        of_means = of_means if blocks == 1 else None
        result = rebuilt_attention(query, latents, span, 0.7, keys_of, values_of, of_means)
    assert calls == ["means" if new == blocks == 1 else "values"]
    turned = torch.zeros(6, 2, PAGE, 2 * RANK)  # what the table says is where
    angles = torch.arange(3 * PAGE).view(3, 1, PAGE, 1)[: span.pages.shape[1]]
    turned[span.pages, ..., :RANK] = cache[span.pages].unsqueeze(2)[..., :RANK] * angles.cos()
    turned[..., RANK:] = torch.einsum("psr,gdr->pgsd", cache, up)
    torch.testing.assert_close(result, paged_head_attention(query, turned, span, 0.7, 0, None))


@pytest.mark.parametrize("shape", [(RANK,), (2, RANK)])
def test_slots_are_written_and_padding_is_not(shape):
    cache, vectors = torch.randn(3, PAGE, *shape), torch.randn(5, *shape)
    expected = cache.clone()
    expected[2, 3], expected[1, 7] = vectors[0], vectors[2]
    slots = torch.tensor([2 * PAGE + 3, -1, PAGE + 7, -1])
    with NoHostSync():
        write_slots(cache, vectors, slots)
    assert torch.equal(cache, expected)


def test_layers_of_a_step_share_masks_and_pages():
    span = span_of(torch.arange(6).view(2, 3), [7, 20], 2)
    for plan in (span.positions, partial(span.hidden, 24, 2), partial(span.windows, 3, 9, 128)):
        assert plan() is plan()
    assert span.hidden(24, 1) is not span.hidden(24, 2)


@pytest.mark.parametrize(
    ("heads", "tokens", "sizes"),
    [
        ((4, 4), 16, (16, 16)),
        ((1, 3), 16, (15, 5)),
        ((6, 10), 16, (15, 9)),
        ((0, 4), 16, (16, 16)),
        ((1, 40), 16, (40, 1)),
    ],
)
def test_blocks_of_both_groups_weigh_the_same(heads, tokens, sizes):
    assert block_sizes(*heads, tokens) == sizes


def test_blocks_of_hard_ratios_waste_little():
    for full in range(1, 97, 5):
        weights = [count * tokens for count, tokens in zip((full, 97), block_sizes(full, 97, 128), strict=True)]
        assert min(weights) >= (1 - WASTED) * max(weights)


def test_a_batch_is_cut_by_new_tokens_length_and_room(monkeypatch):
    assert alike([1, 1, 7, 0, 7, 1], [10, 60, 7, 3, 30, 12]) == [[0, 5], [1], [2], [4]]
    assert alike([7, 7, 1], [9, 8, 9]) == [[2], [1, 0]]
    assert alike([17, 17], [20, 20]) == [[0], [1]]
    monkeypatch.setattr(spans, "GATHERED_TOKENS", 20)
    assert alike([1, 1, 1, 1], [10, 9, 10, 50]) == [[1, 0], [2], [3]]


def test_a_span_finds_its_tokens_and_pages():
    """Requests that are neighbors by slices, others by indices; pages up to the longest."""
    table, lengths = torch.arange(12, dtype=torch.int32).view(3, 4), [9, 5, 8]
    one, pair = spans_of([2, 1, 2], lengths, table, torch.tensor(lengths), 4)
    assert (one.tokens, one.seq_lens.tolist(), one.pages.tolist()) == (slice(2, 3), [5], [[4, 5]])
    assert (pair.tokens.tolist(), pair.seq_lens.tolist()) == ([0, 1, 3, 4], [9, 8])
    assert torch.equal(pair.pages, table[[0, 2], :3].long())
    assert (pair.new, pair.shortest, pair.longest) == (2, 8, 9)


def test_a_span_of_neighbors_and_of_bounds():
    lengths = torch.tensor([9, 8, 9])
    (span,) = spans_of([1, 1, 1], [10, 10, 10], torch.arange(12).view(3, 4), lengths, 4, exact=False)
    assert (span.tokens, span.shortest, span.longest) == (slice(0, 3), 1, 10)
    assert torch.equal(span.seq_lens, lengths)
    assert spans_of([0, 0], [0, 0], torch.zeros(2, 4), lengths[:2], 4) == []


def test_steps_that_kernels_read_are_in_no_span():
    table, lengths = torch.arange(16).view(4, 4), [5, 9, 6, 9]
    assert [num_leading_steps(query_lens) for query_lens in ([1, 1, 3, 1], [1, 1, 0], [2, 1], [1])] == [2, 2, 0, 1]
    rest = spans_of([1, 1, 3, 1], lengths, table, torch.tensor(lengths), 4, skip=2)
    assert [(span.tokens, span.new, span.longest) for span in rest] == [(slice(5, 6), 1, 9), (slice(2, 5), 3, 6)]
    assert [span.pages.tolist() for span in rest] == [[[12, 13, 14]], [[8, 9]]]


LATENT = {"kind": "latent", "kv_lora_rank": 4, "rope_inv_freq": [1.0, 0.1], "key_norm_eps": None}


def config(**changes):
    settings = {"base_model_type": "llama", "attention_layers": [LATENT, None], "kv_cache": None}
    settings |= {"hidden_size": 32}
    settings |= {"num_key_value_heads": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
    entry = changes.pop("entry", None)
    if entry is not None:
        settings["attention_layers"] = [LATENT, entry if "kind" in entry else {**LATENT, **entry}]
    return SimpleNamespace(**settings | changes)


HYBRID = {"kind": "hybrid", "kv_heads": 2, "full_heads": 1, "sinks": 4, "recent": 8}
HYBRID["head_order"] = [0, 1]

ROWS = {**LATENT, "kind": "quantized_latent", "latent_runs": [["4+4", 2]], "rope_runs": [["8", 4]], "first_tokens": 4}
LOW_RANK = {"kind": "low_rank", "blocks": [{"rank": 5, "keys": [1, 0], "values": []}], "shared_layers": 0, "window": 0}
LOW_RANK |= {"shared_rank": 0, "sinks": 0}
LOW_RANK_ROWS = LOW_RANK | {"kind": "quantized_low_rank", "latent_runs": [["8", 4]], "first_tokens": 4}


def test_structures_that_it_serves():
    (low_rank,) = attention_of_layers(config(attention_layers=[LOW_RANK]))
    assert low_rank.blocks == (Block(5, (1, 0), ()),) and low_rank.width(config()) == 5
    cascade = [entry | {"shared_layers": 1, "shared_rank": 5} for entry in (LOW_RANK, LOW_RANK_ROWS)]
    for pair in zip((LOW_RANK, LOW_RANK_ROWS), cascade, strict=True):
        assert [each.shared_layers for each in attention_of_layers(config(attention_layers=[*pair]))] == [0, 1]
    split = attention_of_layers(config(attention_layers=[None, HYBRID]))
    assert [(each.full_heads, each.streaming_heads, each.sinks, each.recent) for each in split] == [
        (2, 0, 0, 0),
        (1, 1, 4, 8),
    ]
    latent = LatentEntry(kv_lora_rank=4, rope_inv_freq=(1.0, 0.1), key_norm_eps=None)
    assert attention_of_layers(config()) == [latent, GroupedEntry(kv_heads=2)]
    assert attention_of_layers(config(entry={"kind": "grouped", "kv_heads": 1}))[1] == GroupedEntry(kv_heads=1)
    normed = config(base_model_type="qwen3", entry={"key_norm_eps": 1e-6})
    normed.attention_layers = normed.attention_layers[1:]
    assert attention_of_layers(normed)[0].width(normed) == 4 + 4 + 2
    assert attention_of_layers(config(sliding_window=64))[0].width(config()) == 4 + 4
    assert attention_of_layers(config(sliding_window=32, use_sliding_window=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_type": "qwen3_moe"}, "family qwen3_moe"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"kv_cache": {"format": "int4"}}, "quantized by kv_cache"),
        ({"sliding_window": 32}, "sliding windows"),
        ({"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"attention_layers": [LOW_RANK | {"window": 4}]}, "low rank with a residual window"),
        (
            {"attention_layers": [LOW_RANK | {"streaming": {"blocks": [0], "sinks": 1, "recent": 4}}]},
            "low rank with streaming .layer 0.",
        ),
        ({"attention_layers": [LOW_RANK, HYBRID]}, "hybrid heads next to latents"),
        ({"base_model_type": "qwen3"}, "grouped heads with q/k-norm"),
        ({"attention_layers": [LATENT, HYBRID]}, "hybrid heads next to latents"),
        ({"entry": ROWS}, "MLA in bits next to layers of other kinds"),
        ({"attention_layers": [ROWS, None]}, "MLA in bits next to layers of other kinds"),
        ({"attention_layers": [LOW_RANK_ROWS, LOW_RANK]}, "low rank in bits next to layers of other kinds"),
        ({"attention_layers": [LOW_RANK_ROWS | {"window": 4}]}, "low rank in bits with a residual window"),
        ({"attention_layers": [HYBRID, HYBRID | {"sinks": 5}]}, "hybrid heads with several windows"),
        ({"entry": {"streaming": {"sinks": 4, "recent": 8}}}, "MLA with streaming"),
    ],
)
def test_other_structures_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        attention_of_layers(config(**changes))


@pytest.mark.parametrize("result", ["0.33.1", "0.3.2"])
def test_another_vllm_is_refused(result, monkeypatch):
    monkeypatch.setattr(plugin_config, "_vllm_version", lambda: result)
    with pytest.raises(ValueError, match=f"tested with vLLM 0.32, not {result}"):
        plugin_config.check_version()
    monkeypatch.setenv(plugin_config.ANY_VERSION, "1")
    plugin_config.check_version()
    monkeypatch.delenv(plugin_config.ANY_VERSION)
    monkeypatch.setattr(plugin_config, "_vllm_version", lambda: "0.32.4rc1")
    plugin_config.check_version()
