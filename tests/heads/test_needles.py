"""Sequences with planted facts, all of them asked for at the end."""

import pytest
import torch
from tiny_models import HELD_OUT

from surgery.common.errors import SurgeryError
from surgery.eval.sequences import tokenize
from surgery.heads.needles import DEPTHS, needle_sequences

LENGTH, FACTS = 512, 5


@pytest.fixture(scope="module")
def filler(tokenizer):
    return tokenize(tokenizer, HELD_OUT.read_text(encoding="utf-8")[:20_000])


def test_facts_and_answers_are_where_they_should_be(tokenizer, filler):
    needles = needle_sequences(tokenizer, filler, 4, LENGTH, FACTS, seed=3)
    assert needles.tokens.shape == needles.answers.shape == needles.fact_numbers.shape == (4, LENGTH)
    assert needles.spans.shape == (4, FACTS, 2)
    for tokens, answers, settings, spans in zip(
        needles.tokens, needles.answers, needles.fact_numbers, needles.spans, strict=True
    ):
        assert tokens[0] == tokenizer.bos_token_id
        assert torch.equal(answers, settings >= 0)
        order = settings[answers].unique_consecutive().tolist()
        assert sorted(order) == list(range(FACTS))
        first = int(answers.nonzero()[0])
        for fact, (start, stop) in enumerate(spans.tolist()):
            line = tokenizer.decode(tokens[start:stop])
            value = tokenizer.decode(tokens[settings == fact]).strip()
            name = line.removeprefix("\n# The secret key of ").split(" is ")[0]
            assert line == f"\n# The secret key of {name} is {value}.\n" and len(value) == 5
            position = int((settings == fact).nonzero()[0])
            assert tokenizer.decode(tokens[:position]).endswith(f"\n# Recall: the secret key of {name} is")
            assert stop <= first
        assert (spans[:, 0].diff() > 0).all() and (spans[:-1, 1] <= spans[1:, 0]).all()


def test_facts_are_spread_over_the_text_as_the_seed_says(tokenizer, filler):
    spans = needle_sequences(tokenizer, filler, 40, LENGTH, FACTS, seed=0).spans.double()
    assert spans[:, 0, 0].min() > DEPTHS[0] * 0.3 * LENGTH
    assert spans[:, 0, 0].mean() < 0.25 * LENGTH < 0.5 * LENGTH < spans[:, -1, 0].mean()
    first, again, other = (needle_sequences(tokenizer, filler, 2, LENGTH, FACTS, seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.spans, again.spans)
    assert not torch.equal(first.tokens, other.tokens)


def test_questions_take_at_most_half(tokenizer, filler):
    needles = needle_sequences(tokenizer, filler, 3, 256, 24, seed=0)
    facts = needles.spans.shape[1]
    assert 1 <= facts < 24
    assert (needles.spans[:, :, 1] - needles.spans[:, :, 0]).sum(1).max() < 128


def test_refusals(tokenizer, filler):
    with pytest.raises(SurgeryError, match="no room for a planted fact"):
        needle_sequences(tokenizer, filler, 1, 48, 1, seed=0)
    with pytest.raises(SurgeryError, match="at least 1"):
        needle_sequences(tokenizer, filler, 0, LENGTH, 1, seed=0)
    with pytest.raises(SurgeryError, match="too few for windows"):
        needle_sequences(tokenizer, filler[:100], 1, LENGTH, 1, seed=0)
