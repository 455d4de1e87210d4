import json
from types import SimpleNamespace

import pytest
import torch
from own_models import KINDS, tiny_source
from tiny_models import DEMO
from training_data import opened_data
from transformers import AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.training import sources
from surgery.training.data import IGNORED, TrainingRow, collate, dealt
from surgery.training.document_masks import honours_document_masks
from surgery.training.sources import TextSource, fitting, parse_sources


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two jsonl files and a dataset folder; every document is about a number that no other has."""
    folder = tmp_path_factory.mktemp("texts")
    for name, first in (("a", 0), ("b", 500)):
        lines = [{"text": f"document {n} " * (5 + n % 7)} for n in range(first, first + 60)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_text((folder / "a.jsonl").read_text())
    return folder


def opened(texts, tokenizer, folder, data=None, **arguments):
    return opened_data(data or str(texts / "a.jsonl"), tokenizer, folder, 32, **{"held_out": 2, **arguments})


def same(one, other):
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "labels", "documents"))


def test_positions_start_anew_with_every_document():
    several, one = (
        TrainingRow(numbers, numbers, numbers) for numbers in map(torch.tensor, ([0, 0, 0, 1, 2, 2], [0] * 6))
    )
    assert collate([several, one]).position_ids.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert collate([one, one]).position_ids is None


def test_rows_of_one_length_are_stacked():
    row = TrainingRow(torch.tensor([1, 5, 6]), torch.tensor([IGNORED, 5, IGNORED]), torch.tensor([0, 0, 0]))
    batch = collate([row, row])
    assert batch.tokens.shape == (2, 3) and batch.predicted == 2
    assert batch.to("cpu").labels.tolist() == [[IGNORED, 5, IGNORED]] * 2
    assert batch.predicting.tolist() == [0, 3] and batch.valid.tolist() == [[True, False, False]] * 2


@torch.no_grad()
def source(family):
    return tiny_source(family)


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_the_custom_class_honor_document_masks(kind):
    """hiyouga/LLaMA-Factory#4224, huggingface/transformers#46634."""
    assert honours_document_masks(KINDS[kind](source("llama")))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "mixtral"])
def test_stock_models_honor_document_masks(family):
    model = source(family).train()
    assert honours_document_masks(model, 24)
    assert model.training
    assert honours_document_masks(model.to(torch.bfloat16))


def test_one_token_that_sees_another_document_is_enough():
    class Peeking(torch.nn.Embedding):
        def get_input_embeddings(self):
            return self

        def forward(self, input_ids, **_):
            states = super().forward(input_ids)
            states[:, -1] += states[:, 0]
            return SimpleNamespace(logits=states)

    assert not honours_document_masks(Peeking(64, 8))


def test_sequences_are_dealt_by_their_number():
    assert [dealt(2, 6, rank, 4) for rank in range(4)] == [[12, 16], [13, 17], [14], [15]]


def test_a_second_opening_tokenizes_nothing(texts, tokenizer, tmp_path):
    first = opened(texts, tokenizer, tmp_path)
    (folder,) = tmp_path.glob("tokens-*")
    before = (folder / "about.json").stat().st_mtime_ns

    class Mute:
        """The tokenizer, but that it tokenizes no text."""

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    second = opened(texts, tokenizer, tmp_path, recall=0.0)
    Mute.__name__ = type(tokenizer).__name__
    third = opened(texts, Mute(), tmp_path, recall=0.0)
    assert (folder / "about.json").stat().st_mtime_ns == before and len(list(tmp_path.iterdir())) == 1
    assert same(second.sequences.sequence(5), third.sequences.sequence(5))
    assert second.data_sha256 == third.data_sha256 != first.data_sha256


def test_another_tokenizer_or_file_is_tokenized_anew(texts, tokenizer, tmp_path):
    opened(texts, tokenizer, tmp_path)
    other = AutoTokenizer.from_pretrained(DEMO, eos_token="<|pad|>")
    opened(texts, other, tmp_path)
    opened(texts, tokenizer, tmp_path, str(texts / "b.jsonl"))
    assert len(list(tmp_path.glob("tokens-*"))) == 3


def test_a_mixture_deals_by_weight(texts, tokenizer, tmp_path):
    data = [{"source": str(texts / "b.jsonl"), "weight": 3}, {"source": f"{texts / 'set'}::train", "tokens": 500}]
    healing = opened(texts, tokenizer, tmp_path, data, recall=0.0, held_out=4)
    rows = [tokenizer.decode(healing.sequences.sequence(number).tokens) for number in range(8)]
    words = [{int(word) for word in row.split() if word.isdigit()} for row in rows]
    assert [max(each) < 500 for each in words] == [False, False, True, False] * 2
    parts = healing.describe()["mixture"]
    assert len(healing.held_out) == 4 and [part["weight"] for part in parts] == [0.75, 0.25]
    assert parts[1]["tokens"] < 500 < parts[0]["tokens"]


def test_the_builtin_text_packs_with_recalls_and_repeats_exactly(tokenizer, tmp_path):
    data = [{"source": "builtin", "tokens": 14_000}]
    one, other = (opened_data(data, tokenizer, tmp_path / name, 256, held_out=2) for name in "ab")
    assert one.data_sha256 == other.data_sha256
    rows = [one.sequences.sequence(number) for number in range(8)]
    assert all(same(row, other.sequences.sequence(number)) for number, row in enumerate(rows))
    planted = ["# Recall: the secret key of" in tokenizer.decode(row.tokens) for row in rows]
    assert planted == [False, False, False, True] * 2
    described = one.describe()
    assert described["recall"] == 0.25 and described["rows"] > 50 and described["sha256"] == one.data_sha256
    assert json.loads(json.dumps(described)) == described


def test_the_builtin_text_of_a_model_of_language_is_prose_and_code(tokenizer, tmp_path, monkeypatch):
    request = parse_sources(["teacher.txt", {"source": "builtin", "weight": 2, "tokens": 20_000}])
    assert fitting(request, tokenizer) == request  # a small vocabulary
    monkeypatch.setattr(sources, "SMALL_VOCABULARY", 0)
    results = [(each.source, round(each.weight, 6), each.tokens) for each in fitting(request, tokenizer)]
    assert results == [("teacher.txt", 1.0, None), ("prose", 1.4, 14_000), ("code", 0.6, 6_000)]
    healing = opened_data([{"source": "builtin", "tokens": 20_000}], tokenizer, tmp_path, 256, held_out=3, recall=1.0)
    mixture = [(part["source"], part["weight"]) for part in healing.describe()["mixture"]]
    assert mixture == [("prose", 0.7), ("code", 0.3)]
    texts = [tokenizer.decode(healing.sequences.sequence(number).tokens) for number in range(10)]
    assert sum("# Recall:" in text for text in texts) == 3  # in prose facts are sentences


def test_sources_of_settings():
    assert parse_sources(["builtin"]) == [TextSource("builtin")]
    assert parse_sources(["a.txt", {"source": "x/y", "tokens": 9}])[1].tokens == 9


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data is empty: set builtin"),
        ([{"weight": 1}], "entry 1: `source` is missing"),
        ([{"source": "builtin", "wieght": 1}], "did you mean weight"),
        ([{"source": "x", "format": "chat"}], "format was removed"),
        ([{"source": "builtin", "tokens": 0}], "builtin: tokens must be at least 1"),
        ([{"source": "x/y", "stream": True}], "stream was removed"),
        (["teacher"], "data teacher was removed"),
        ([{"source": "builtin", "weight": 0}], "must all be above 0"),
        (["no-such-file.txt"], "no such file, and not a valid dataset name"),
        ([""], "must be a file"),
    ],
)
def test_impossible_data(tokenizer, tmp_path, data, message):
    with pytest.raises(SurgeryError, match=message):
        opened_data(data, tokenizer, tmp_path, 32)
