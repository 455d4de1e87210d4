import random
from itertools import pairwise

import pytest

from surgery.common.errors import SurgeryError
from surgery.eval.haystack import Haystack, largest_fit, python_reference
from surgery.eval.word_lists import ADJECTIVES, NOUNS, VERBS, adjective_noun, draw_distinct


def test_prose_is_cut_at_words_and_split_at_sentences_and_code_at_lines():
    haystack = Haystack.of_words("One two. Three  four\nfive? Six.")
    assert haystack.sentences(0, 6) == ["One two.", "Three four five?", "Six."]
    assert haystack.sentences(0, 3) == ["One two.", "Three"]
    assert haystack.sentences(1, 4) == ["Three four five?", "Six."]  # the first sentence from there on
    assert haystack.sentences(5, 4) == ["Six.", "One two.", "Three"]  # and round
    assert Haystack.of_words("a b c").sentences(1, 4) == ["b c a b"]
    haystack = Haystack.of_lines("def f():\n\n    return 1  \r\nx = 2")
    assert haystack.sentences(0, 3) == ["def f():\n", "    return 1\n", "x = 2\n"]
    assert haystack.sentences(2, 2) == ["x = 2\n", "def f():\n"]


@pytest.mark.parametrize("haystack", [Haystack.of_words("a b. c d e. f"), Haystack.of_lines("a\nb\nc")])
def test_a_longer_passage_starts_with_the_shorter(haystack):
    for start in range(6):
        passages = [haystack.separator.join(haystack.sentences(start, count)) for count in range(20)]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(passages))
        assert passages[0] == "" and len(set(passages)) == 20


def test_the_reference_is_prose():
    text = python_reference()
    assert 100_000 < len(text) < 600_000
    assert "**" not in text and "::=" not in text and "\n   " not in text and "  " not in text
    paragraphs = text.split("\n")
    assert len(set(paragraphs)) == len(paragraphs) and all(part[-1] in ".?!" for part in paragraphs)


def test_the_largest_that_fits():
    rng = random.Random(0)
    for _ in range(300):
        base, slope, bend, calls = rng.randint(0, 300), rng.uniform(0.05, 20), rng.random(), []

        def measure(size, base=base, slope=slope, bend=bend, calls=calls):
            calls.append(size)
            return int(base + slope * size + bend * size**1.1)

        least = rng.randint(1, 50)
        room = measure(least) + rng.randint(0, 40_000)
        size = largest_fit(measure, room, least, rng.choice((0, least, 3000)))
        assert measure(size) <= room < measure(size + 1)
        assert len(calls) < 30


def test_the_search_ends_whatever_the_measure_does():
    assert largest_fit(lambda size: 5, 100, 1, 1) > 100
    for seed in range(100):
        rng = random.Random(seed)
        noisy = {}
        size = largest_fit(lambda size, noisy=noisy, rng=rng: noisy.setdefault(size, rng.randint(0, 200)), 200, 1, 9)
        assert noisy[size] <= 200
        noisy = {1: 0}
        size = largest_fit(lambda size, noisy=noisy, rng=rng: noisy.setdefault(size, rng.randint(0, 200)), 100, 1, 9)
        assert noisy[size] <= 100


def test_words_are_different_and_none_is_part_of_another():
    words = ADJECTIVES + NOUNS + VERBS
    assert len(set(words)) == len(words) > 800 and all(word.isalpha() and word.islower() for word in words)
    joined = " ".join(words)
    assert [word for word in words if joined.count(word) > 1] == []
    drawn = draw_distinct(random.Random(1), adjective_noun, 500)
    assert len(set(drawn)) == 500 and draw_distinct(random.Random(1), adjective_noun, 5) == drawn[:5]
    with pytest.raises(SurgeryError, match="4 different words are needed and only about 3 exist"):
        draw_distinct(random.Random(0), lambda rng: rng.choice("abc"), 4)
