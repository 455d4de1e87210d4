import random
import re

import pytest
import torch
from copying_model import CopyingModel
from sessions import session
from tiny_models import HELD_OUT

from surgery.common.errors import SurgeryError
from surgery.eval.recall import QUESTION, fact_line
from surgery.eval.sequences import tokenize
from surgery.eval.tasks.needle import (
    ANSWER_TOKENS,
    NeedleHaystack,
    NeedleTask,
    default_lengths,
    needle_prompts,
    python_reference,
)

SOURCE = HELD_OUT.read_text(encoding="utf-8")[:40_000]
TEXTS = {"text": python_reference()[:40_000], "code": SOURCE}


@pytest.fixture(scope="module")
def haystacks(tokenizer):
    return {domain: NeedleHaystack(tokenizer, domain, text) for domain, text in TEXTS.items()}


@pytest.mark.parametrize("domain", TEXTS)
@pytest.mark.parametrize("length", [256, 257, 700])
def test_prompts_have_exactly_the_length_and_one_needle(tokenizer, haystacks, domain, length):
    prompts = needle_prompts(haystacks[domain], length, (0, 33, 100), 4, seed=0)
    assert len(prompts) == 12 and len({prompt.value for prompt in prompts}) == 12
    for prompt in prompts:
        assert len(prompt.ids) + ANSWER_TOKENS == length and prompt.ids[0] == tokenizer.bos_token_id
        text = tokenizer.decode(prompt.ids[1:])
        if domain == "code":
            name = re.search(r"secret key of (\w+) is$", text)[1]
            assert text.endswith(QUESTION.format(name=name)) and text.count("# The secret key of") == 1
            assert fact_line(name, prompt.value) in text and re.fullmatch(r"\d{5}", prompt.value)
        else:
            key = re.search(r"number for (\S+) mentioned in the provided text is$", text)[1]
            assert text.count("One of the special magic numbers for") == 1
            assert f"One of the special magic numbers for {key} is: {prompt.value}." in text
            assert re.fullmatch(r"\d{7}", prompt.value)


@pytest.mark.parametrize("domain", TEXTS)
def test_needles_stand_at_their_depths_after_sentences(tokenizer, haystacks, domain):
    length, mark = 3000, {"code": "\n# The secret", "text": " One of the special"}[domain]
    for depth in (0, 25, 50, 75, 100):
        for prompt in needle_prompts(haystacks[domain], length, (depth,), 3, seed=1):
            before, _, after = tokenizer.decode(prompt.ids[1:]).rpartition(mark)
            assert len(tokenize(tokenizer, before)) / length == pytest.approx(depth / 100, abs=0.08)
            if 0 < depth < 100:
                following = after.partition(f"{prompt.value}.")[2]
                assert following.startswith("\n\n" if domain == "code" else " ")
                assert domain == "code" or before.endswith((".", "?", "!"))


def test_the_seed_the_length_and_the_depth_decide(haystacks):
    def first(length=300, depth=50, seed=0):
        return needle_prompts(haystacks["code"], length, (depth,), 1, seed)[0]

    assert first() == first()
    assert len({first().value, first(seed=1).value, first(length=301).value, first(depth=51).value}) == 4
    several = needle_prompts(haystacks["code"], 300, (0, 50), 3, seed=0)
    assert several[3] == first()


def test_a_short_text_is_repeated_and_a_short_length_refused(tokenizer):
    haystack = NeedleHaystack(tokenizer, "code", "x = 1\n")
    assert len(haystack.prompt(500, 50, random.Random(0)).ids) == 500 - ANSWER_TOKENS
    with pytest.raises(SurgeryError, match=r"take \d+ tokens: a needle length of 20 is too small"):
        haystack.prompt(20, 50, random.Random(0))


def test_the_reference_is_prose():
    text = python_reference()
    assert 100_000 < len(text) < 600_000
    assert "**" not in text and "::=" not in text and "\n   " not in text and "  " not in text
    paragraphs = text.split("\n")
    assert len(set(paragraphs)) == len(paragraphs) and all(part[-1] in ".?!" for part in paragraphs)


def test_default_lengths_and_settings_that_tell_data_apart():
    assert default_lengths(2048) == (512, 1024, 2048, 3072)
    assert default_lengths(32_768) == (8192, 16_384, 32_768)
    assert default_lengths(131_072) == (8192, 16_384, 32_768)
    assert default_lengths(None) == (1024, 2048, 4096)
    first, again, other = (NeedleTask((32,), (0,), 1, haystack=text).settings() for text in ("a b.", "a b.", "a c."))
    assert first == again and first != other and first != NeedleTask((64,), (0,), 1, haystack="a b.").settings()
    with pytest.raises(SurgeryError, match="empty"):
        NeedleTask((32,), (0,), 1, haystack=" ")


@torch.no_grad()
def test_a_copying_model_finds_every_needle_at_any_length(tokenizer):
    task = NeedleTask((256, 500), (0, 50, 100), trials=3, domain="code", haystack=SOURCE)
    model = CopyingModel(len(tokenizer))
    model.config.max_position_embeddings = 300
    result = task.run(model, session(tokenizer, batch_size=4, limit=2), None)
    assert result["accuracy"] == 1.0 and result["grid"] == [[1.0] * 3] * 2 and result["hits"] == [1] * 12
    assert result["lengths"] == [256, 500] and result["limit"] == 300 and result["beyond_limit"] == [500]
    assert result["depths"] == [0, 50, 100] and result["trials"] == 2


def test_hits_are_ordered_by_length_depth_and_trial(tokenizer, monkeypatch):
    import surgery.eval.tasks.needle as needle_task

    task = NeedleTask((256, 300), (0, 100), trials=2, domain="code", haystack=SOURCE)

    def complete(model, session, prompts, new_tokens, label):
        """Right for the first trial of depth 0, and for both of depth 100 of the second length; nearly right else."""
        length = int(re.search(r"\d+", label)[0])
        built = needle_prompts(NeedleHaystack(tokenizer, "code", SOURCE), length, (0, 100), 2, session.seed)
        right = [True, False, length == 300, length == 300]
        answers = [prompt.value if ok else prompt.value[:-1] for prompt, ok in zip(built, right, strict=True)]
        return [tokenize(tokenizer, " " + answer) for answer in answers]

    monkeypatch.setattr(needle_task, "complete", complete)
    result = task.run(CopyingModel(8), session(tokenizer), None)
    assert result["hits"] == [1, 0, 0, 0, 1, 0, 1, 1]
    assert result["grid"] == [[0.5, 0.0], [0.5, 1.0]] and result["accuracy"] == 0.5
