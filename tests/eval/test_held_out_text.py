import pytest
import torch
from tiny_models import HELD_OUT

from surgery.common.errors import SurgeryError
from surgery.eval.held_out_text import Document, held_out_text
from surgery.eval.sequences import random_windows, tokenize


def test_windows_are_those_of_the_whole_text(tokenizer):
    text = HELD_OUT.read_text(encoding="utf-8")
    built = held_out_text(tokenizer, [Document(text, ((0, "all"),))], 5, 64, seed=3)
    expected = random_windows(tokenize(tokenizer, text), 5, 64, 3, tokenizer.bos_token_id)
    assert torch.equal(built.tokens, expected)
    assert built.ids.tolist() == tokenize(tokenizer, text)


def test_every_token_knows_its_source_and_bytes(tokenizer):
    text = "alpha = 1\n" * 40 + "naïve = '日本語 🙂'\n" * 40
    border = len("alpha = 1\n" * 40)
    built = held_out_text(tokenizer, [Document(text, ((0, "a"), (border, "b")))], 8, 32, seed=0)
    assert built.sources == ("a", "b")
    bos = built.tokens == tokenizer.bos_token_id
    assert (built.bytes[bos] == 0).all()
    for window, source in zip(built.tokens, built.source, strict=True):
        first, second = (tokenizer.decode(window[source == index][1:]) for index in (0, 1))
        assert "naïve" not in first and "alpha =" not in second
    # Over the whole text the bytes of the tokens are those of the text.
    whole = held_out_text(tokenizer, [Document(text, ((0, "a"),))], 1, len(built.ids) - 1, seed=0)
    decoded = tokenizer.decode(whole.tokens[0, 1:])
    assert abs(int(whole.bytes.sum()) - len(decoded.encode())) <= 4


def test_documents_are_separated_and_labeled(tokenizer):
    documents = [Document("x = 1\n" * 30, ((0, "one"),)), Document("y = 2\n" * 30, ((0, "two"),))]
    built = held_out_text(tokenizer, documents, 4, 50, seed=1)
    assert built.ids.tolist().count(tokenizer.eos_token_id) == 1
    assert set(built.source.unique().tolist()) == {0, 1}
    assert built.first(2).tokens.shape == (2, 50) and built.first(None).sha256 == built.sha256 != built.first(2).sha256


def test_every_text_has_its_share_of_windows(tokenizer):
    texts = {"long": "x = 1\n" * 3000, "short": "y = 2\n" * 30, "third": "z = 3\n" * 90}
    documents = [Document(text, ((0, name),)) for name, text in texts.items()]
    built = held_out_text(tokenizer, documents, 7, 50, seed=1)
    assert built.source[:, 1:].unique(dim=1).flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert built.sources == tuple(texts)
    with pytest.raises(SurgeryError) as error:
        held_out_text(tokenizer, documents, 2, 50, seed=1)
    assert (error.value.setting, error.value.hint) == ("windows", "--windows 3")
    with pytest.raises(SurgeryError, match="short has"):
        held_out_text(tokenizer, documents, 7, 500, seed=1)


def test_too_little_text_is_refused(tokenizer):
    with pytest.raises(SurgeryError, match="too few"):
        held_out_text(tokenizer, [Document("x = 1\n", ((0, "a"),))], 4, 50, seed=1)
    with pytest.raises(SurgeryError, match="no held-out text"):
        held_out_text(tokenizer, [], 4, 50, seed=1)
