import hashlib
import json
import re

import pytest
import torch
from tiny_models import byte_tokenizer

from surgery.calibration.held_out import HeldOut
from surgery.calibration.sequences import SequenceRequest, build_calibration, token_hash
from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError

FACT = re.compile(r"# The secret key of (\w+) is (\d{5})\.\n")
RECALL = re.compile(r"# Recall: the secret key of (\w+) is (\d{5})\.\n")


@pytest.fixture
def source(tmp_path):
    """Sixty documents, each of one word of its own, so that a token tells its document."""
    path = tmp_path / "documents.jsonl"
    documents = [f"{chr(0x100 + number)} " * 700 for number in range(60)]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(path)


def build(tokenizer, source, *settings, bos="tokenizer", **more):
    return build_calibration(tokenizer, source, SequenceRequest(*settings, **more), bos=bos)


def test_the_default_calibration(tokenizer):
    built = build(tokenizer, "builtin")
    assert built.tokens.shape == (24, 1024) and built.held_out.shape == (4, 1024)
    assert built.tokens.dtype == built.held_out.dtype == torch.int64
    for row in torch.cat([built.tokens, built.held_out]):
        assert row[0] == tokenizer.bos_token_id
        text = tokenizer.decode(row)
        facts = {match.groups(): match.start() for match in FACT.finditer(text)}
        settings = {match.groups(): match.start() for match in RECALL.finditer(text)}
        assert len(facts) == 4 and facts.keys() == settings.keys()
        assert all(facts[pair] < settings[pair] for pair in facts)
    json.dumps(built.description)


def test_equal_arguments_give_equal_sequences_and_hashes(tokenizer, source):
    first, again, other = (build(tokenizer, source, 1024, 256, seed=seed, held_out=2) for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.held_out, again.held_out)
    assert first.description == again.description
    assert not torch.equal(first.tokens, other.tokens)
    assert first.description["sha256"] != other.description["sha256"]
    little_endian = b"".join(int(token).to_bytes(8, "little") for token in first.tokens.flatten())
    assert first.description["sha256"] == hashlib.sha256(little_endian).hexdigest() == token_hash(first.tokens)
    assert first.description["held_out_sha256"] == token_hash(first.held_out)


def test_held_out_text_is_from_other_documents(source):
    tokenizer = byte_tokenizer(eos_token="</s>")
    built = build(tokenizer, source, 8192, 512, recall=0, held_out=8, bos=None)
    # A window may start or end inside a character, which decodes to the replacement character.
    calibrated, held_out = (
        {letter for letter in tokenizer.decode(part.flatten()) if 0x100 <= ord(letter) < 0x200}
        for part in (built.tokens, built.held_out)
    )
    assert len(calibrated) > 2 and len(held_out) > 2 and not calibrated & held_out


def test_documents_are_separated_by_eos(source):
    tokenizer = byte_tokenizer(eos_token="</s>")
    built = build(tokenizer, source, 8192, 4096, recall=0, held_out=0, bos=None)
    for row in built.tokens:
        ends = (row == tokenizer.eos_token_id).nonzero().flatten()
        assert 1 <= len(ends) <= 2 and (ends.diff() == 2101).all()  # two bytes and a space, 700 times, and eos


@pytest.mark.parametrize("special", [{}, {"bos_token": "<s>"}, {"eos_token": "</s>"}])
def test_a_tokenizer_may_lack_special_tokens(special, source):
    tokenizer = byte_tokenizer(**special)
    built = build(tokenizer, source, 1024, 512, held_out=1)
    assert built.tokens.shape == (2, 512)
    if "bos_token" in special:
        assert (built.tokens[:, 0] == tokenizer.bos_token_id).all()
    assert all(len(RECALL.findall(tokenizer.decode(row))) >= 1 for row in built.tokens)


def test_bos_can_be_chosen(tokenizer, source):
    assert (build(tokenizer, source, 512, 256, bos=7).tokens[:, 0] == 7).all()
    assert (build(tokenizer, source, 512, 256, bos=None).tokens[:, 0] != tokenizer.bos_token_id).all()


@pytest.mark.parametrize(("share", "expected"), [(0, 0), (0.25, 2), (0.5, 4), (1, 8)])
def test_the_share_of_sequences_with_recalls(tokenizer, source, share, expected):
    built = build(tokenizer, source, 2048, 256, recall=share, held_out=0)
    carrying = ["Recall" in tokenizer.decode(row) for row in built.tokens]
    assert sum(carrying) == expected
    assert sum(carrying[:4]) == expected // 2  # spread evenly


@pytest.mark.parametrize(("length", "facts"), [(16, 0), (64, 1), (192, 2), (1024, 4)])
def test_short_sequences_carry_fewer_facts(tokenizer, source, length, facts):
    built = build(tokenizer, source, 4 * length, length, held_out=0)
    assert built.tokens.shape == (4, length)
    assert [len(RECALL.findall(tokenizer.decode(row))) for row in built.tokens] == [facts] * 4


def test_the_length_is_capped_by_the_model(tokenizer, source):
    settings = ConversionSettings(calibration_tokens=1000, calibration_length=1024, held_out=1)
    built = build_calibration(tokenizer, source, SequenceRequest.of(settings, max_positions=300))
    assert built.tokens.shape == (4, 300)
    assert built.description["length"] == 300


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"tokens": 0}, "0 calibration tokens"),
        ({"length": 1}, "in sequences of 1"),
        ({"recall": 1.5}, "recall 1.5: .* must be from 0 to 1"),
        ({"held_out": -1}, "held_out must be at least 0, not -1"),
        ({"tokens": 10**7}, "too little text"),
        ({"source": "nowhere.jsonl"}, "no such file, and not a valid dataset name"),
    ],
)
def test_impossible_requests(tokenizer, source, request_, message):
    arguments = {"source": source, "tokens": 512, "length": 256, "held_out": 2, **request_}
    with pytest.raises(SurgeryError, match=message):
        build(tokenizer, **arguments)


def test_parts_of_held_out_text_share_no_row():
    answers = torch.eye(3, 6, dtype=torch.bool)
    whole = HeldOut(torch.arange(48).view(8, 6), 5, answers)
    first, second = whole.split(2)
    assert [(part.texts, len(part.answers)) for part in (first, second)] == [(2, 2), (3, 1)]
    assert torch.equal(torch.cat([first.answers, second.answers]), answers)
    rows = [part.tokens.split([part.texts, len(part.answers)]) for part in (first, second)]
    texts, prompts = (torch.cat(parts) for parts in zip(*rows, strict=True))
    assert torch.equal(torch.cat([texts, prompts]), whole.tokens)
