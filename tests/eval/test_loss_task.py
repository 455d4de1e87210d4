"""The loss task: what it must equal, on tiny random models of every family."""

import math

import pytest
import torch
from sessions import session
from tiny_models import FAMILIES, HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document, held_out_text
from surgery.eval.logits import LogitReader
from surgery.eval.tasks.loss import (
    LossTask,
    losses_and_divergence,
    losses_of_states,
    losses_through_cache,
    position_buckets,
)


@pytest.fixture(scope="module")
def text(tokenizer):
    content = HELD_OUT.read_text(encoding="utf-8")
    return held_out_text(tokenizer, [Document(content, ((0, "first"), (40_000, "second")))], 5, 40, seed=0)


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_own_loss_in_one_forward_and_through_the_cache(checkpoints, tokenizer, text, family):
    model = load(checkpoints(family))
    result = LossTask(text, decoded=9).run(model, session(tokenizer, batch_size=2), None)
    with torch.no_grad():
        expected = [model(row[None], labels=row[None], use_cache=False).loss.item() for row in text.tokens]
    assert result["per_sequence"] == pytest.approx(expected, abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)
    assert result["cached"]["largest_difference"] < 1e-4
    assert result["cached"]["loss"] == pytest.approx(result["loss"], abs=1e-5)


def test_parts_add_up(checkpoints, tokenizer, text):
    result = LossTask(text, decoded=0).run(load(checkpoints("llama")), session(tokenizer, batch_size=2), None)
    assert result["cached"] is None and result["divergence"] is None
    for parts in (list(result["by_source"].values()), result["by_position"]):
        assert sum(part["tokens"] for part in parts) == result["tokens"] == 5 * 39
        assert sum(part["tokens"] * part["loss"] for part in parts) == pytest.approx(result["tokens"] * result["loss"])
    nats = result["loss"] * result["tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / int(text.bytes[:, 1:].sum()))


def test_divergence_from_the_baseline(checkpoints, tokenizer, text):
    task, one, other = LossTask(text, decoded=0), load(checkpoints("llama")), load(checkpoints("mistral"))
    entries = task.keep(one, session(tokenizer, batch_size=2))
    same = task.run(one, session(tokenizer, batch_size=2), entries)["divergence"]
    assert same["kl"] == pytest.approx(0, abs=1e-6) and same["top1_agreement"] == 1
    result = task.run(other, session(tokenizer, batch_size=2), entries)["divergence"]
    with torch.no_grad():
        p, q = (model(text.tokens, use_cache=False).logits[:, :-1].double().log_softmax(-1) for model in (one, other))
    assert result["kl_per_sequence"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean(1).tolist(), rel=1e-4)
    kl = (p.exp() * (p - q)).sum(-1)
    expected = torch.quantile(kl, torch.tensor([0.99, 0.999], dtype=kl.dtype)).tolist()
    assert [result["kl_99"], result["kl_99_9"]] == pytest.approx(expected, rel=1e-3)
    assert result["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())


def test_divergence_where_states_are_logits(checkpoints, text):
    """A model without a plain head keeps its logits instead."""
    model = load(checkpoints("llama"))
    reader = LogitReader(model, text.tokens)
    with torch.no_grad():
        states, logits = reader.states(text.tokens)[:, :-1], model(text.tokens).logits[:, :-1]
        losses, kl, same = losses_and_divergence(reader, states, text.tokens[:, 1:], None, logits)
        assert torch.equal(losses, losses_of_states(reader, states, text.tokens[:, 1:]))
    assert kl.abs().max() < 1e-5 and same.all()


def test_a_wrong_cache_shows(checkpoints, tokenizer, text, monkeypatch):
    """A cache that forgets is worse through decoding, not in one forward: what the second loss is there for."""
    from transformers.cache_utils import DynamicLayer

    update = DynamicLayer.update

    def forgetful(self, keys, values, *args, **kwargs):
        keys, values = update(self, keys, values, *args, **kwargs)
        return keys, values * (1 if keys.shape[-2] < 35 else 0)

    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    result = LossTask(text, decoded=9).run(load(checkpoints("llama")), session(tokenizer, batch_size=2), None)
    cached = result["cached"]
    assert cached["largest_difference"] > 0.01
    # Only the 9 decoded tokens of 39 differ from one forward pass.
    added = sum(cached["decoded_per_sequence"]) / 5 - cached["decoded_loss_one_forward"]
    assert added == pytest.approx((cached["loss"] - result["loss"]) * 39 / 9, rel=1e-3)


def test_limit_takes_the_first_windows(checkpoints, tokenizer, text):
    model = load(checkpoints("llama"))
    every = LossTask(text, 5).run(model, session(tokenizer, batch_size=2), None)
    first = LossTask(text, 5).run(model, session(tokenizer, batch_size=2, limit=2), None)
    assert first["sequences"] == 2 and first["per_sequence"] == pytest.approx(every["per_sequence"][:2], abs=1e-6)


def test_settings_name_the_data(tokenizer, text):
    other = held_out_text(tokenizer, [Document(HELD_OUT.read_text(encoding="utf-8"), ((0, "a"),))], 5, 40, seed=1)
    assert LossTask(text).settings()["data_sha256"] != LossTask(other).settings()["data_sha256"]


def test_position_buckets_cover_every_predicted_token():
    for length in (2, 31, 32, 33, 64, 1024, 1500):
        buckets = position_buckets(length)
        assert [start for start, _ in buckets] == [1, *(end for _, end in buckets[:-1])]
        assert buckets[-1][1] == length


def test_decoding_everything_is_refused(checkpoints, text):
    with pytest.raises(SurgeryError, match="decoded must be from 1 to"):
        losses_through_cache(LogitReader(load(checkpoints("llama")), text.tokens), text.tokens, 39)
