"""Scores of heads from forward passes alone, on attention whose right answer is known and on the demo model."""

from dataclasses import replace

import pytest
import torch
from tiny_models import DEMO, HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.sequences import random_windows, tokenize
from surgery.heads import attention_rows, induction, needle
from surgery.heads.methods import scorer
from surgery.heads.needles import needle_sequences
from surgery.heads.scorer import ScoringSession
from surgery.heads.settings import HeadSettings
from surgery.heads.ties import break_ties
from surgery.running.attention_tap import AttentionCall, tap_attention

CHEAP = ("needle", "induction")


@pytest.fixture(scope="module")
def session(tokenizer):
    ids = tokenize(tokenizer, HELD_OUT.read_text(encoding="utf-8")[:60_000])

    def make(model, method="needle", length=128, **settings):
        settings = {"sinks": 4, "recent": 16, "facts": 3, "samples": 2, **settings}
        settings = HeadSettings(method=method, length=length, **settings)
        return ScoringSession(
            model.requires_grad_(False),
            tokenizer,
            settings,
            lambda count: random_windows(ids, count, length, 0, tokenizer.bos_token_id),
            lambda count: needle_sequences(tokenizer, ids, count, length, settings.facts, 0),
            0,
            Progress(silent=True),
        )

    return make


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def best(scores, count):
    return {divmod(index, scores.shape[1]) for index in scores.flatten().topk(count).indices.tolist()}


# Rows of attention


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_rows_are_those_of_the_whole_matrix(checkpoints, family):
    model = load(checkpoints(family), attn_implementation="eager")
    ids = torch.randint(3, 4096, (2, 50), generator=torch.Generator().manual_seed(0))
    expected = model(ids, output_attentions=True).attentions
    rows = torch.tensor([0, 7, 31, 49])

    def look(call):
        result = attention_rows.attention_rows(call, rows)
        assert torch.allclose(result, expected[call.layer][:, :, rows], atol=1e-5)
        keys = torch.tensor([0, 5, 6, 20, 30])
        some = attention_rows.attention_rows(call, rows[2:], keys)
        picked = expected[call.layer][:, :, rows[2:]][..., keys]
        records = picked.sum(-1, keepdim=True)
        assert torch.allclose(some * records, picked, atol=1e-5)
        return call.output()

    with torch.no_grad(), tap_attention(model, look):
        model(ids)


def test_rows_after_a_cache_see_the_cache_and_pieces_cover_all_rows(monkeypatch):
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 8, 4)
    attention = attention_rows.attention_rows(AttentionCall(0, query, key, key, None, 1.0), torch.arange(3))
    assert (attention > 0).sum(-1).tolist() == [[[6, 7, 8]] * 2]
    monkeypatch.setattr(attention_rows, "ENTRIES", 100)
    part = torch.zeros(1, 2, 10, 4)
    pieces = list(attention_rows.row_pieces(AttentionCall(0, part, part, part, None, 1.0), torch.arange(3, 10)))
    assert max(map(len, pieces)) == 5 and torch.equal(torch.cat(pieces), torch.arange(3, 10))


# Hand-made attention: four query heads, of which the right ones are known


def looking_at(key_of):
    """Attention rows of heads that look at one key each: ``key_of(row, head)``."""

    def rows_of(call, rows, keys=None):
        attention = torch.zeros(1, call.query.shape[1], len(rows), call.key.shape[2])
        for head in range(attention.shape[1]):
            for index, row in enumerate(rows.tolist()):
                attention[0, head, index, key_of(row, head)] = 1
        return attention

    return rows_of


def test_echo_and_induction_of_heads_that_are_such(monkeypatch, checkpoints, session):
    length, period = 129, 32
    heads = (lambda row: row, lambda row: row - period, lambda row: row - period + 1, lambda row: 0)
    monkeypatch.setattr(induction, "attention_rows", looking_at(lambda row, head: heads[head](row)))
    result = induction.score(session(load(checkpoints("llama")), "induction", length))
    assert result.facts == {"repeated_tokens": period, "repetitions": 4}
    assert result.parts["echo"].tolist() == [[0, 1, 0, 0]] * 2
    assert result.parts["induction"].tolist() == [[0, 0, 1, 0]] * 2
    assert result.scores.dtype == torch.float32 and result.scores.shape == (2, 2)


def test_repeated_tokens(checkpoints, session, tokenizer):
    scored = session(load(checkpoints("llama")), "induction", 131)
    first, other = induction.repeated_tokens(scored, 2)
    assert len(first) == 129 and first[0] == tokenizer.bos_token_id
    repetitions = first[1:].view(4, 32)
    assert (repetitions == repetitions[0]).all() and len(repetitions[0].unique()) == 32
    assert not set(repetitions[0].tolist()) & set(tokenizer.all_special_ids)
    assert not torch.equal(first, other)
    with pytest.raises(SurgeryError, match="too few for repeated text"):
        induction.repeated_tokens(session(scored.model, "induction", 12), 1)


def test_kept_order_takes_one_echo_head_for_fourteen_of_induction():
    induction_scores = torch.arange(20, 0, -1).double().view(4, 5)
    echo = torch.zeros(4, 5, dtype=torch.float64)
    echo[3, 4] = 1  # the last by induction
    order = (1 - induction.selection_order(echo, induction_scores)).flatten() * 20
    # Fourteen by induction, then the best by echo, then the rest.
    assert order.round().int().tolist() == [*range(1, 15), 16, 17, 18, 19, 20, 15]
    flat = torch.zeros(3, 4, dtype=torch.float64)
    assert len(induction.selection_order(flat, flat).unique()) == 12


class KnowsAll:
    """A reader of a model that predicts every next token right."""

    def __init__(self, model, tokens):
        self.model = model

    def states(self, tokens):
        self.model.base_model(input_ids=tokens, use_cache=False)
        return torch.cat((tokens[:, 1:], tokens[:, :1]), 1)

    def logits(self, states):
        return torch.nn.functional.one_hot(states, 4096).float()


def test_copy_score_of_a_head_that_copies(monkeypatch, checkpoints, session):
    scored = session(load(checkpoints("llama")), samples=1)
    needles = scored.needles(1)
    answers = needles.tokens[0, needles.answers[0]]
    assert needles.spans[0, 0, 0] > 4
    needles.tokens[0, 1:5] = answers[:4]  # before all facts
    scored = replace(scored, needles=lambda count: needles)
    tokens, request = needles.tokens[0].tolist(), needles.fact_numbers[0].tolist()

    def source(row):
        """Position of the next token in the fact that is asked for."""
        start, stop = needles.spans[0, request[row + 1]].tolist()
        return tokens.index(tokens[row + 1], start, stop)

    def elsewhere(row):
        """Position of the same token before all facts, if it stands there."""
        position = tokens.index(tokens[row + 1])
        return position if position < needles.spans[0, 0, 0] else 0

    nth = {}
    for position, fact in enumerate(request):
        if fact >= 0:
            nth[position] = nth.get(position - 1, -1) + 1
    answer = max(nth.values()) + 1
    heads = (elsewhere, lambda row: source(row) if nth[row + 1] < 2 else 0, source, lambda row: row)
    assert sum(elsewhere(position - 1) > 0 for position in nth) >= 4
    monkeypatch.setattr(needle, "attention_rows", looking_at(lambda row, head: heads[head](row)))
    monkeypatch.setattr(needle, "LogitReader", KnowsAll)
    result = needle.score(scored)
    expected = torch.tensor([[0, 2 / answer, 1, 0]] * 2)
    assert torch.allclose(result.parts["copy"], expected) and torch.allclose(result.parts["mass"], expected)
    assert (result.scores[:, 1] > result.scores[:, 0]).all()
    facts = needles.spans.shape[1]
    assert result.facts == {"needles": facts, "needles_answered": facts}


def test_what_cannot_be_scored_is_refused(checkpoints, session):
    with pytest.raises(SurgeryError, match="answers none of"):
        needle.score(session(load(checkpoints("llama"))))
    with pytest.raises(SurgeryError, match="choose duo"):
        HeadSettings(method="magic")


# All of them


def test_ties_are_ordered_and_nothing_else():
    scores = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    by = torch.tensor([[1.0, 3.0, 2.0], [0.0, 9.0, 1.0]])
    broken = break_ties(scores, by)
    assert broken.flatten().argsort(descending=True).tolist() == [3, 2, 0, 4, 1, 5]
    assert (broken - scores).abs().max() < 0.25
    assert torch.equal(break_ties(scores, torch.zeros(2, 3)), scores)


@pytest.mark.parametrize("method", CHEAP)
def test_finds_the_heads_that_retrieve(session, method):
    """Compare with the demo model's 24 heads: streaming these three, one by one, costs the most recall."""
    model = load(DEMO)
    length = 512
    result = scorer(method)(session(model, method, length, sinks=16, recent=112))
    assert result.scores.shape == (6, 4) and result.scores.dtype == torch.float32
    assert {(5, 1), (3, 0), (4, 3)} <= best(result.scores, 3)
