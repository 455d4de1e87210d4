"""Hybrid attention through its cache against its source in one pass, with a dense mask of every head's own."""

import random

import own_models as own
import pytest
import torch
from own_models import hybrid_entry, hybrid_model, tiny_source, tokens
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import surgery.model.hybrid_cache
from surgery.model import SurgeryConfig, SurgeryForCausalLM

HEADS, KV_HEADS = 8, 4
MANY_HEADS = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": 32}
MANY_HEADS |= {"head_dim": own.HEAD_DIM}


class DenseReference:
    """Attention of a whole text as a registered function: each KV head's mask as its definition says."""

    def __init__(self, entries: list[dict | None], padding: list[int]):
        self.entries, self.padding = entries, padding

    def __call__(self, module, query, key, value, attention_mask, scaling, **kwargs):
        out = []
        for head in range(key.shape[1]):
            size = query.shape[1] // key.shape[1]
            queries = query[:, head * size : (head + 1) * size]
            out.append(self.head(module.layer_idx, head, queries, key[:, head], value[:, head], scaling))
        return torch.cat(out, dim=1).transpose(1, 2), None

    def head(self, layer, head, query, key, value, scaling):
        """query [B, g, T, d], key and value [B, T, d] of one KV head → [B, g, T, d]."""
        entry = self.entries[layer] or hybrid_entry(KV_HEADS, list(range(KV_HEADS)))
        rank = entry["head_order"].index(head)
        q, p = torch.arange(key.shape[1])[:, None], torch.arange(key.shape[1])
        first = torch.tensor(self.padding)[:, None, None]
        causal = (p <= q) & (p >= first)
        near = (q - p < entry["recent"]) | (p - first < entry["sinks"])
        visible = causal & (near | torch.tensor(rank < entry["full_heads"]))
        scores = scaling * query @ key[:, None].mT
        scores = scores.masked_fill(~(visible | (p == q))[:, None], float("-inf"))
        values = value[:, None].expand(-1, query.shape[1], -1, -1)
        return scores.softmax(-1) @ values


def reference_logits(source: PreTrainedModel, entries, padding, ids) -> torch.Tensor:
    AttentionInterface.register("dense_reference", DenseReference(entries, padding))
    AttentionMaskInterface.register("dense_reference", lambda *args, **kwargs: None)
    source.set_attn_implementation("dense_reference")
    return source(ids).logits


def agree_after_padding(actual, expected, padding, tolerance=1e-10):
    for row, first in enumerate(padding):
        own.agree(actual[row, first:], expected[row, first:], tolerance)


def random_entry(rng: random.Random) -> dict | None:
    """Draw an entry of one layer: all full, all streaming, any mix, or the stock attention."""
    full = rng.choice([4, 0, 0, 3, 2, 1])
    order = rng.sample(range(KV_HEADS), KV_HEADS)
    window = {"sinks": rng.choice([0, 1, 4]), "recent": rng.choice([1, 2, 7, 16])}
    return rng.choice([None, *[hybrid_entry(full, order, **window)] * 4])


def random_chunks(rng: random.Random, length: int) -> list[int]:
    """A prompt in chunks and then tokens one by one."""
    prompt = rng.choice([1, length // 2, length - 3, length])
    chunks = []
    while sum(chunks) < prompt:
        chunks.append(min(rng.choice([1, 3, 8, length]), prompt - sum(chunks)))
    return chunks + [1] * (length - prompt)


# Experts change nothing that attention sees.
TRIED = (("eager", "llama"), ("sdpa", "llama"), ("sdpa", "qwen3"))


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        pytest.param(family, how, marks=[pytest.mark.slow] * ((how, family) not in TRIED))
        for family in own.FULL_ATTENTION
        for how in ("sdpa", "eager")
    ],
)
def test_the_cache_is_the_source_with_dense_masks(family, implementation, monkeypatch):
    rng = random.Random(f"{family} {implementation}")
    source = tiny_source(family, **MANY_HEADS).double()
    tolerance = 1e-10 if implementation == "sdpa" else 1e-5  # a family's own eager attention has its softmax in fp32
    for _ in range(5):
        monkeypatch.setattr(surgery.model.hybrid_cache, "PIECE", rng.choice([1, 256]))
        entries = [random_entry(rng) for _ in range(own.LAYERS - 1)] + [
            hybrid_entry(1, [2, 0, 1, 3], sinks=2, recent=5)
        ]
        rng.shuffle(entries)
        batch, length = rng.choice([(1, 9), (1, 40), (3, 14), (3, 40)])
        padding = [rng.choice([0, 2, length // 2]) for _ in range(batch)]
        ids = tokens(batch, length)
        model = hybrid_model(source, entries).double()
        model.set_attn_implementation(implementation)
        expected = reference_logits(source, entries, padding, ids)
        chunks = random_chunks(rng, length)
        for sizes in (chunks, [length]):
            agree_after_padding(own.through_cache(model, ids, padding, sizes), expected, padding, tolerance)
        mask = (torch.arange(length) >= torch.tensor(padding)[:, None]).long()
        agree_after_padding(model(ids, attention_mask=mask, use_cache=False).logits, expected, padding, tolerance)


@pytest.mark.parametrize("form", ["int4", "fp8"])
def test_quantized_streaming_heads_do_not_depend_on_chunks(form):
    source = tiny_source("llama", **MANY_HEADS).double()
    kv_cache = {"format": "int8", "group": 32, "window": 64, "keys": "channel", "streaming_format": form}
    entries = [hybrid_entry(1, [3, 1, 0, 2], sinks=2, recent=6), hybrid_entry(0, [0, 1, 2, 3], sinks=0, recent=4)]
    model, exact = (hybrid_model(source, entries, kv_cache=cache).double() for cache in (kv_cache, None))
    ids, padding = tokens(2, 30), [0, 5]
    expected = own.through_cache(model, ids, padding, [30])
    for chunks in ([10, 10, 1, 1, 8], [1] * 30):
        agree_after_padding(own.through_cache(model, ids, padding, chunks), expected, padding, 1e-9)
    assert (expected - own.through_cache(exact, ids, padding, [30])).abs().max() > 1e-4
    cache = model(ids).past_key_values
    assert [layer.reads_ahead for layer in cache.layers] == [True, False]
    assert torch.equal(model.train()(ids).logits, exact(ids).logits), "training reads no codes"


@pytest.mark.parametrize("make", ["hybrid", "window", "blocks", "latent"])
def test_gradient_checkpointing_knows_the_padding(make):
    source = tiny_source("llama")
    entry = hybrid_entry(1, [1, 0], sinks=2, recent=4)
    window = {"kind": "low_rank", "blocks": [{"rank": 32, "keys": [0, 1], "values": [0, 1]}], "shared_layers": 0}
    window |= {"shared_rank": 0, "sinks": 2, "window": 4}
    model = {
        "hybrid": lambda: hybrid_model(source, [entry] * own.LAYERS),
        "window": lambda: noisy(own.lossless_low_rank(source, [window] * own.LAYERS)),
        "blocks": lambda: own.lossless_low_rank(source, own.streaming_blocks_entries(2, 4)),
        "latent": lambda: own.lossless_streaming_latent(source, 2, 4),
    }[make]()
    ids = tokens(3, 14)
    mask = (torch.arange(14) >= torch.tensor([0, 3, 8])[:, None]).long()

    @torch.enable_grad()
    def gradients():
        model.zero_grad()
        first = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        other = model(ids[:, 2:], labels=ids[:, 2:]).loss  # of another padding, before the first one's backward pass
        (first + other).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    plain = gradients()
    trained = model.train()
    trained.gradient_checkpointing_enable()
    for name, gradient in gradients().items():
        own.agree(gradient, plain[name], 1e-4)


def noisy(model: SurgeryForCausalLM) -> SurgeryForCausalLM:
    """Rebuilt tokens that are not the exact ones."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_down.weight += 0.2 * torch.randn(
                layer.self_attn.kv_down.weight.shape, generator=torch.Generator().manual_seed(5)
            )
    return model


def test_masks_that_a_window_cannot_follow_are_refused():
    model = hybrid_model(tiny_source("llama"), [hybrid_entry(1, [1, 0], sinks=1, recent=3)] * own.LAYERS)
    ids = tokens(1, 6)
    right = torch.tensor([[1, 1, 1, 1, 0, 0]])
    cache = model(ids, attention_mask=right).past_key_values  # padding after the text disturbs nothing
    with pytest.raises(ValueError, match="pad on the left"):
        model(ids[:, :1], attention_mask=torch.cat([right, right[:, :1]], dim=1), past_key_values=cache)
    with pytest.raises(ValueError, match="2D \\[batch, tokens\\]"):
        model(ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_families_with_windows_of_their_own_are_refused(family):
    with pytest.raises(ValueError, match="sliding_attention"):
        hybrid_model(tiny_source(family), [hybrid_entry(1, [1, 0])] * own.LAYERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3, "head_order": [0, 1, 2]}, "must be a multiple of"),
        ({"full_heads": 3}, "full_heads must be 0 to 2, not 3"),
        ({"full_heads": -1}, "not -1"),
        ({"compensated_heads": 1}, "convert the source again"),
        ({"recent": 0}, "recent must be at least 1"),
        ({"sinks": -1}, "sinks at least 0"),
        ({"head_order": [0, 0]}, "head_order"),
        ({"window": 3}, "has keys"),
    ],
)
def test_impossible_entries_are_refused(change, message):
    base = tiny_source("llama").config
    with pytest.raises(ValueError, match=message):
        SurgeryConfig.from_base(base, [hybrid_entry(1, [0, 1]) | change, None])


def test_streams_of_a_share_of_layers():
    """A hybrid layer of another number of KV heads, next to stock, grouped and low-rank ones."""
    source = tiny_source("llama")
    entries = [hybrid_entry(1, [1, 0], sinks=1, recent=4), {"kind": "grouped", "kv_heads": 2}]
    ids = tokens(2, 20)
    expected = reference_logits(source, [entries[0], hybrid_entry(2, [0, 1])], [0, 0], ids)
    own.agree(own.through_cache(hybrid_like_grouped(source, entries), ids, [0, 0], [12, *[1] * 8]), expected, 1e-4)
    config = SurgeryConfig.from_base(source.config, [hybrid_entry(1, [0, 1, 2, 3]), None])
    assert SurgeryForCausalLM(config)(ids).logits.shape == (2, 20, own.VOCAB)


def hybrid_like_grouped(source, entries):
    model = hybrid_model(source, [entries[0], None])
    config = SurgeryConfig.from_base(source.config, entries, experts_implementation="eager")
    grouped = SurgeryForCausalLM(config)
    grouped.load_state_dict(model.state_dict())
    return grouped.eval()
