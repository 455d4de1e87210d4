"""Whatever interrupts the writer, the disk is afterwards as it was before."""

import errno
import os

import pytest
import torch

from surgery.checkpoint import CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError

PLAN = {"a": TensorSpec(torch.float32, (2, 3)), "b": TensorSpec(torch.bfloat16, (4,))}
A, B = torch.arange(6.0).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left on the disk"), (errno.EIO, "Input/output error")]
)
def test_disk_fails_while_writing(tmp_path, disk, monkeypatch, code, words):
    before = disk()
    write, calls = os.write, []

    def failing(handle, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(code, os.strerror(code))
        return write(handle, data[: max(1, len(data) // 2)])  # the system may write less than asked

    monkeypatch.setattr(os, "write", failing)
    with pytest.raises(SurgeryError, match=words) as caught, CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
    assert "\n" not in str(caught.value)
    assert disk() == before


def test_interrupts(tmp_path, disk):
    before = disk()
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "deep" / "er" / "out", PLAN) as writer:
        writer.write("a", A)
        writer.write_text("sub/x", "x")
        assert writer.partial.is_dir()
        assert not writer.out.exists()
        raise KeyboardInterrupt
    assert disk() == before


def test_interrupt_while_files_are_made(tmp_path, disk, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    before = disk()
    monkeypatch.setattr("surgery.checkpoint.writer.encode_header", interrupted)
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "deep" / "out", PLAN):
        pass
    assert disk() == before


def test_leaving_without_commit(tmp_path, disk):
    before = disk()
    with CheckpointWriter(tmp_path / "out", PLAN) as writer:
        writer.write("a", A)
        writer.write("b", B)
        writer.finish()
    assert disk() == before
