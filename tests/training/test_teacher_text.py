import pytest
import torch
from tiny_models import CONFIGS
from training_data import opened_data
from transformers import LlamaForCausalLM

from surgery.common.errors import SurgeryError
from surgery.training import teacher_text
from surgery.training.teacher_text import fingerprint, sample_teacher

LENGTH = 12


@pytest.fixture(scope="module")
def teacher():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIGS["llama"]())


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(teacher_text, "SHARD", 4)


def drawn(teacher, tokenizer, folder, tokens=130, **arguments):
    return [document.tokens for document in sample_teacher(teacher, tokenizer, folder, tokens, LENGTH, **arguments)]


def test_samples_are_whole_shards_and_the_seed_decides(teacher, tokenizer, tmp_path):
    samples = drawn(teacher, tokenizer, tmp_path / "a")
    assert len(samples) == 12 and all(len(row) == LENGTH and row[0] == tokenizer.bos_token_id for row in samples)
    assert len({tuple(row) for row in samples}) == 12  # no shard repeats another
    assert samples == drawn(teacher, tokenizer, tmp_path / "b")
    assert samples != drawn(teacher, tokenizer, tmp_path / "b", seed=1)


def test_a_stopped_sampling_goes_on_where_it_was(teacher, tokenizer, tmp_path, monkeypatch):
    expected = drawn(teacher, tokenizer, tmp_path / "whole")
    sample, calls = teacher_text.sample_from_model, []

    def stopped(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sample(*arguments, **options)

    monkeypatch.setattr(teacher_text, "sample_from_model", stopped)
    with pytest.raises(KeyboardInterrupt):
        drawn(teacher, tokenizer, tmp_path / "part")
    assert drawn(teacher, tokenizer, tmp_path / "part") == expected
    assert len(calls) == 4  # the first shard was not drawn again
    assert drawn(teacher, tokenizer, tmp_path / "part", tokens=300)[:12] == expected  # more of the same
    assert len(calls) == 8


def test_other_weights_have_another_fingerprint(teacher):
    torch.manual_seed(1)
    other = LlamaForCausalLM(CONFIGS["llama"]())
    assert fingerprint(teacher) != fingerprint(other)
    other.load_state_dict(teacher.state_dict())
    assert fingerprint(teacher) == fingerprint(other)


def test_a_damaged_shard_is_named(teacher, tokenizer, tmp_path):
    drawn(teacher, tokenizer, tmp_path)
    path = next(tmp_path.rglob("00001.safetensors"))
    path.write_bytes(b"no tensors")
    with pytest.raises(SurgeryError, match=r"00001\.safetensors: not a shard"):
        drawn(teacher, tokenizer, tmp_path)


def test_impossible_requests(teacher, tokenizer, tmp_path):
    with pytest.raises(SurgeryError, match="0 tokens of the teacher"):
        drawn(teacher, tokenizer, tmp_path, tokens=0)
    with pytest.raises(SurgeryError, match="longer than the model's 256 positions"):
        list(sample_teacher(teacher, tokenizer, tmp_path, 300, 300))


def test_every_row_is_one_sample_of_the_teacher(teacher, tokenizer, tmp_path):
    asked = []

    def give():
        asked.append(1)
        return teacher

    data = [{"source": "teacher", "tokens": 20 * LENGTH}]
    healing = opened_data(data, tokenizer, tmp_path, LENGTH, held_out=3, recall=0.0, teacher=give)
    samples = [tuple(row) for row in drawn(teacher, tokenizer, tmp_path, 20 * LENGTH)]
    rows = [healing.sequences.sequence(number) for number in range(healing.describe()["rows"])]
    assert sorted(samples) == sorted(tuple(row.tokens.tolist()) for row in rows + healing.held_out)
    assert all(torch.equal(row.labels[1:], row.tokens[1:]) and not row.documents.any() for row in rows)
    again = opened_data(data, tokenizer, tmp_path, LENGTH, held_out=3, recall=0.0, teacher=give)
    assert again.data_sha256 == healing.data_sha256
