"""Top-k logits of a teacher: what they are compared as, and how they lie on disk."""

import json
from dataclasses import replace

import divergences
import pytest
import torch
from torch import nn
from torch.nn.functional import log_softmax

from surgery.common.errors import SurgeryError
from surgery.training import teacher_logits
from surgery.training.chunks import States
from surgery.training.teacher_logits import HEADER, CacheIdentity, TeacherLogits
from surgery.training.top_k import LEAST, top_k

torch.set_num_threads(1)
N, VOCAB, WIDTH, LENGTH = 20, 31, 5, 9


def states(seed: int, *shape: int, dtype=torch.float64) -> States:
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(WIDTH, VOCAB).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return States(torch.randn(*shape, WIDTH, generator=generator).to(dtype).requires_grad_(), head)


@pytest.mark.parametrize("chunks", [1, 3, 30])
def test_fewer_tokens_and_one_for_the_rest(chunks):
    student, teacher = states(0, N), states(1, N)
    top = top_k(teacher, 4, torch.float64)
    actual = divergences.forward_kl(student, top, chunks=chunks)

    def merged(logits):
        probabilities = logits.softmax(-1)
        names = probabilities.gather(1, top.ids.long())
        return torch.cat([names, 1 - names.sum(1, keepdim=True)], dim=1)

    p, q = merged(teacher.head(teacher.hidden).detach()), merged(student.head(student.hidden))
    expected = (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-9)
    pair = [torch.autograd.grad(value, student.hidden)[0] for value in (actual, expected)]
    torch.testing.assert_close(*pair, atol=1e-9, rtol=1e-9)


def test_top_k_in_chunks_and_half_precision():
    teacher = states(1, N, dtype=torch.float32)
    whole, parts = top_k(teacher, 5, torch.float32), top_k(teacher, 5, torch.float32, max_bytes=4 * VOCAB * 3)
    assert torch.equal(whole.ids, parts.ids)
    # Products of fewer rows may be summed in another order: on some CPUs they are equal to the bit, on others not.
    torch.testing.assert_close(whole.values, parts.values, rtol=1e-6, atol=1e-6)
    logs = log_softmax(teacher.head(teacher.hidden), -1)
    torch.testing.assert_close(whole.values, logs.gather(1, whole.ids.long()))
    torch.testing.assert_close(whole.values.exp().sum(1) + whole.rest.exp(), torch.ones(N))
    student = states(0, N, dtype=torch.float32)
    half = top_k(teacher, 5)
    assert (half.values.dtype, half.ids.dtype, half.rest.dtype) == (torch.float16, torch.int32, torch.float32)
    loss = [divergences.forward_kl(student, top) for top in (half, whole)]
    torch.testing.assert_close(*loss, atol=1e-3, rtol=1e-3)


def test_certain_teachers_leave_finite_gradients():
    student, teacher = states(0, N, dtype=torch.float32), states(1, N, dtype=torch.float32)
    with torch.no_grad():
        teacher.head.bias[3] = 1e4
    top = top_k(teacher, 2)
    assert top.rest.min() >= LEAST and top.values.isfinite().all()
    value = divergences.forward_kl(student, top)
    assert value.isfinite() and torch.autograd.grad(value, student.hidden)[0].isfinite().all()


IDENTITY = CacheIdentity(model="m" * 64, data="d" * 64, sequences=7, length=LENGTH, vocabulary=VOCAB, k=3)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", 3 * IDENTITY.sequence_bytes)


def teacher_of(records: list | None = None):
    teacher = states(1, IDENTITY.sequences, LENGTH, dtype=torch.float32)

    def give(numbers: range) -> States:
        if records is not None:
            records.extend(numbers)
        return teacher._replace(hidden=teacher.hidden[numbers.start : numbers.stop])

    return give


def test_written_and_read(tmp_path, small_shards):
    cache = TeacherLogits(tmp_path / "logits", IDENTITY)
    assert cache.missing() == [range(0, 3), range(3, 6), range(6, 7)]
    counted = []
    cache.fill(teacher_of(), batch=2, advance=counted.append)
    assert cache.missing() == [] and sum(counted) == 7
    give = teacher_of()
    for number in (6, 0, 4):
        hidden = give(range(number, number + 1)).hidden[0, :-1]
        expected = top_k(States(hidden, give(range(1)).head), 3)
        read = TeacherLogits(tmp_path / "logits", IDENTITY).read(number)
        for name in ("values", "ids", "rest"):
            assert torch.equal(getattr(read, name), getattr(expected, name)), name
    batch = cache.batch([5, 2])
    assert batch.values.shape == (2, LENGTH - 1, 3) and torch.equal(batch.rest[1], cache.read(2).rest)


def test_bytes_are_as_stated(tmp_path):
    cache = TeacherLogits(tmp_path, IDENTITY)
    cache.fill(teacher_of())
    assert IDENTITY.sequence_bytes == (LENGTH - 1) * (3 * 6 + 4)
    size = (tmp_path / "shard-00000.safetensors").stat().st_size
    assert 0 < size - 7 * IDENTITY.sequence_bytes < 400


def test_goes_on_where_it_stopped(tmp_path, small_shards):
    def stopping(numbers):
        if numbers.start >= 4:
            raise KeyboardInterrupt
        return teacher_of()(numbers)

    with pytest.raises(KeyboardInterrupt):
        TeacherLogits(tmp_path, IDENTITY).fill(stopping, batch=1)
    cache = TeacherLogits(tmp_path, IDENTITY)
    assert cache.missing() == [range(3, 6), range(6, 7)]
    calls = []
    cache.fill(teacher_of(calls))
    assert calls == [3, 4, 5, 6] and cache.missing() == []


def test_processes_share_the_shards(tmp_path, small_shards):
    class Process:
        count = 2

        def __init__(self, rank):
            self.rank = rank

        def wait(self):
            pass

    shares = [[], []]
    # Both know what is missing before either has written.
    caches = [TeacherLogits(tmp_path, IDENTITY) for _ in shares]
    missing = caches[0].missing()
    for rank, cache in enumerate(caches):
        cache.missing = lambda: missing
        cache.fill(teacher_of(shares[rank]), processes=Process(rank))
    assert shares == [[0, 1, 2, 6], [3, 4, 5]]
    assert TeacherLogits(tmp_path, IDENTITY).missing() == []


def test_other_caches_and_folders_are_refused(tmp_path):
    TeacherLogits(tmp_path, IDENTITY)
    for name in vars(IDENTITY):
        changed = "x" if name in ("model", "data") else 10
        with pytest.raises(SurgeryError, match=rf"do not fit this run \(.*{name} "):
            TeacherLogits(tmp_path, replace(IDENTITY, **{name: changed}))
    (tmp_path / HEADER).write_text(json.dumps({"format": 0}))
    with pytest.raises(SurgeryError, match="format 0 instead of 1"):
        TeacherLogits(tmp_path, IDENTITY)
    (tmp_path / HEADER).rename(tmp_path / "thesis.txt")
    with pytest.raises(SurgeryError, match="contains files other than"):
        TeacherLogits(tmp_path, IDENTITY)


def test_a_damaged_shard(tmp_path, small_shards):
    cache = TeacherLogits(tmp_path, IDENTITY)
    cache.fill(teacher_of())
    (tmp_path / "shard-00002.safetensors").write_bytes(b"12345678" * 3)
    with pytest.raises(SurgeryError, match=r"shard-00002\.safetensors: damaged"):
        cache.read(6)
