from types import SimpleNamespace

import numpy as np
import pytest
import torch

from surgery.common.errors import SurgeryError
from surgery.training.data import IGNORED
from surgery.training.open_data import MixedSequences
from surgery.training.packing import PackedSequences, Recalls, RowShape
from surgery.training.shuffling import _mixed, interleaving, shuffled
from surgery.training.token_file import TokenFile

BOS, EOS = 1, 0


def documents(count, shortest=3, longest=40):
    """Documents of tokens that no other document has, ended by eos."""
    lengths = np.random.default_rng(0).integers(shortest, longest, count).tolist()
    return [[1000 * (number + 1) + position for position in range(n)] + [EOS] for number, n in enumerate(lengths)]


def token_file(folder, texts, limit=None):
    return TokenFile.write(folder / "tokens", {"of": "test"}, texts, limit)


def text_shape(length=16):
    return RowShape(length, BOS)


def owners(row):
    return {token // 1000 for token in row.tokens.tolist() if token >= 1000}


def test_a_token_file_gives_back_what_was_written(tmp_path):
    texts = [[5, 6, 7], [], [70_000]]
    result = token_file(tmp_path, texts)
    again = TokenFile.read(tmp_path / "tokens", {"of": "test"})
    assert len(again) == 2 and again.lengths.tolist() == [3, 1]
    assert [again.document(number) for number in range(2)] == [texts[0], texts[2]]
    assert again.document(0, 1, 2) == [6]
    assert again.sha256 == result.sha256
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_token_file_is_that_of_its_identity_and_documents(tmp_path):
    token_file(tmp_path, documents(3))
    assert TokenFile.read(tmp_path / "tokens", {"of": "another"}) is None
    assert TokenFile.read(tmp_path / "none", {"of": "test"}) is None
    one = token_file(tmp_path / "a", [[1, 2], [3]]).sha256
    assert token_file(tmp_path / "b", [[1, 2], [3]]).sha256 == one
    assert token_file(tmp_path / "c", [[1], [2, 3]]).sha256 != one


def test_a_failed_writing_leaves_nothing(tmp_path):
    def broken():
        yield [1, 2]
        raise SurgeryError("line 2 is bad")

    with pytest.raises(SurgeryError, match="line 2 is bad"):
        token_file(tmp_path, broken())
    with pytest.raises(SurgeryError, match="data has no text"):
        token_file(tmp_path, [])
    assert not list(tmp_path.iterdir())


def test_a_damaged_token_file_is_none(tmp_path):
    token_file(tmp_path, documents(3))
    path = tmp_path / "tokens" / "tokens.i4"
    path.write_bytes(path.read_bytes()[:-4])
    assert TokenFile.read(tmp_path / "tokens", {"of": "test"}) is None


def test_reading_stops_at_the_limit(tmp_path):
    texts = documents(50)
    file = token_file(tmp_path, texts, limit=100)
    total = int(file.lengths.sum())
    assert 100 <= total < 100 + 41 and len(file) < 50


def test_an_epoch_holds_every_token_once_but_for_the_last_row_s_rest_in_orders_of_its_own(tmp_path):
    texts = documents(30)
    packed = PackedSequences(token_file(tmp_path, texts), text_shape(), "test")
    rows = [packed.sequence(number).tokens.tolist() for number in range(packed.rows)]
    assert all(len(row) == 16 and row[0] == BOS for row in rows)
    records = sorted(token for row in rows for token in row[1:] if token != EOS)
    every = sorted(token for text in texts for token in text if token != EOS)
    assert len(records) == len(set(records)) and set(records) <= set(every) and len(every) - len(records) < 15
    epochs = [
        [tuple(packed.sequence(number).tokens.tolist()) for number in range(e * packed.rows, (e + 1) * packed.rows)]
        for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]


def test_any_row_can_be_asked_for_at_any_time(tmp_path):
    file = token_file(tmp_path, documents(30))
    first, second = (PackedSequences(file, text_shape(), "test", seed=3) for _ in range(2))
    forward = [first.sequence(number).tokens for number in range(40)]
    for number in (39, 0, 17, 38, 1):
        assert torch.equal(second.sequence(number).tokens, forward[number])
    other = PackedSequences(file, text_shape(), "test", seed=4)
    assert not all(torch.equal(other.sequence(number).tokens, forward[number]) for number in range(5))
    assert first.data_sha256 == second.data_sha256 != other.data_sha256


def test_labels_and_documents_of_a_row_of_text(tmp_path):
    packed = PackedSequences(token_file(tmp_path, documents(30, 3, 8)), text_shape(), "test")
    for number in range(packed.rows):
        row = packed.sequence(number)
        numbers, labels = row.documents.tolist(), row.labels.tolist()
        assert numbers[0] == 0 and set(np.diff(numbers)) <= {0, 1} and numbers[-1] > 0
        assert labels[0] == IGNORED  # bos
        for t in range(1, 16):
            first = numbers[t] != numbers[t - 1]
            assert labels[t] == (IGNORED if first else row.tokens[t])
            assert first == (row.tokens[t - 1] == EOS)


def test_held_out_documents_are_in_no_row_and_do_not_depend_on_the_seed(tmp_path):
    file = token_file(tmp_path, documents(40))
    one, other = (PackedSequences(file, text_shape(), "test", seed, held_out=4) for seed in (0, 1))
    assert len(one.held_out) == 4
    for a, b in zip(one.held_out, other.held_out, strict=True):
        assert torch.equal(a.tokens, b.tokens)
    aside = set().union(*map(owners, one.held_out))
    for packed in (one, other):
        trained = set().union(*(owners(packed.sequence(number)) for number in range(packed.rows)))
        assert trained and not aside & trained


class Letters:
    """A tokenizer of characters, as far as planting needs one."""

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    def text(self, row):
        return "".join(chr(token) for token in row.tokens.tolist() if token < 1000)


def test_a_share_of_the_rows_carries_planted_facts_in_one_document(tmp_path):
    file, letters = token_file(tmp_path, documents(200)), Letters()
    shape = text_shape(600)
    plain = PackedSequences(file, shape, "test", held_out=1)
    packed = PackedSequences(file, shape, "test", held_out=1, recalls=Recalls(letters, 0.25, 0))
    for number in range(16):
        row = packed.sequence(number)
        if number % 4 != 3:
            assert torch.equal(row.tokens, plain.sequence(number).tokens)
            continue
        assert len(row.tokens) == 600 and row.tokens[0] == BOS
        text = letters.text(row)
        request = text.split("# Recall: the secret key of ")[1:]
        assert request and all(f"# The secret key of {line[: line.index('.')]}." in text for line in request)
        assert row.documents.max() == 0 and (row.labels[1:] == row.tokens[1:]).all()
        assert torch.equal(row.tokens, packed.sequence(number).tokens)
    assert "Recall" not in letters.text(packed.held_out[0])
    assert packed.data_sha256 != plain.data_sha256


def test_a_mixture_goes_through_each_source_in_order():
    class Numbers:
        """Sequences that are their number, and their source's."""

        def __init__(self, source):
            self.source, self.data_sha256 = source, str(source)

        def sequence(self, number):
            return self.source, number

    mixture = MixedSequences([Numbers(0), Numbers(1), Numbers(2)], [5, 3, 2])
    rows = [mixture.sequence(number) for number in range(40)]
    for source, share in enumerate([5, 3, 2]):
        assert [number for of, number in rows if of == source] == list(range(4 * share))
    assert [mixture.sequence(number) for number in (33, 7)] == [rows[33], rows[7]]
    assert mixture.data_sha256 != MixedSequences([Numbers(0), Numbers(1), Numbers(2)], [5, 2, 3]).data_sha256


@pytest.mark.parametrize(("count", "held_out"), [(1, 1), (2, 40), (1, 0)])
def test_too_little_text(tmp_path, count, held_out):
    file = token_file(tmp_path, documents(count, 5, 6) if not held_out else documents(count))
    with pytest.raises(SurgeryError, match=r"novel\.txt has too little text"):
        PackedSequences(file, text_shape(), "novel.txt", held_out=held_out)


def test_orders_are_the_same_on_every_machine_and_mixtures_keep_their_shares():
    assert shuffled(8, 1, 2).tolist() == [1, 3, 7, 2, 6, 4, 5, 0]
    assert _mixed(np.zeros(1, dtype=np.uint64))[0] == 0xE220A8397B1DCDAF  # SplitMix64's first number after seed 0
    assert sorted(shuffled(1000, 5)) == list(range(1000))
    assert not np.array_equal(shuffled(50, 0, 1), shuffled(50, 1, 0))
    order = interleaving([3, 1])
    assert order.tolist() == [0, 0, 1, 0]
    thirds = interleaving([1, 1, 1])
    assert np.bincount(thirds).tolist() == [334, 333, 333]
    assert set(interleaving([998, 1, 1])) == {0, 1, 2}
    for weights in ([1, 0], [1, -1], [], [1, 5000]):
        with pytest.raises(SurgeryError, match="weights of data must"):
            interleaving(weights)
