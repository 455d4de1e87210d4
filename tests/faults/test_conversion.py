"""Whatever happens to a conversion: one clear line, exit code 1, nothing left, and the source as it was."""

import errno
import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from surgery.checkpoint import CheckpointReader, stores
from surgery.structures.stages import StageTracker


def check_refused(conversion, ended, lines, words, *, source=True):
    assert ended == 1
    assert lines[-1].startswith("surgery: error: ") and words in lines[-1]
    conversion.check_nothing_left(source=source)


@contextmanager
def longest_file(size):
    """No file of this process grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 4_000, 50_000])
def test_files_that_cannot_grow(conversion, size):
    """The limit of a user, which ends writes as a full disk does: in statistics, weights or the files next to them."""
    with longest_file(size):
        ended, lines = conversion.run()
    check_refused(conversion, ended, lines, "")
    assert any(word in lines[-1].lower() for word in ("too large", "writ"))


def full_at(monkeypatch, name, code, number):
    """Let the n-th call of a function of os fail."""
    real, calls = getattr(os, name), []

    def failing(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, failing)
    return calls


@pytest.mark.parametrize("number", [1, 7])
def test_a_disk_that_fills_while_weights_are_written(conversion, monkeypatch, number):
    calls = full_at(monkeypatch, "write", errno.ENOSPC, number)
    ended, lines = conversion.run()
    check_refused(conversion, ended, lines, "no space left on the disk")
    assert len(calls) == number


def test_a_disk_that_fills_while_it_is_flushed(conversion, monkeypatch):
    full_at(monkeypatch, "fsync", errno.ENOSPC, 1)
    check_refused(conversion, *conversion.run(), "no space left on the disk")


@pytest.mark.parametrize("number", [1, 3, 12])
def test_a_disk_that_cannot_be_read(conversion, monkeypatch, number):
    read, calls = stores.read_exactly, []

    def failing(file, view):
        calls.append(file)
        if len(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, view)

    monkeypatch.setattr(stores, "read_exactly", failing)
    ended, lines = conversion.run()
    check_refused(conversion, ended, lines, "Input/output error")
    assert str(conversion.source) in lines[-1]


def when_layers_are_done(monkeypatch, happens):
    """Let something happen between two layers."""
    advance = StageTracker.advance

    def then(*arguments, **options):
        happens()
        return advance(*arguments, **options)

    monkeypatch.setattr(StageTracker, "advance", then)


def test_a_source_that_vanishes(conversion, monkeypatch):
    when_layers_are_done(monkeypatch, lambda: shutil.rmtree(conversion.source, ignore_errors=True))
    check_refused(conversion, *conversion.run(), "source", source=False)


@pytest.mark.parametrize("settings", ["torch", "python"])
def test_memory_that_runs_out(conversion, monkeypatch, settings):
    room = {"torch": lambda: torch.empty(2**60, dtype=torch.uint8), "python": lambda: bytes(2**60)}
    when_layers_are_done(monkeypatch, room[settings])
    check_refused(conversion, *conversion.run(), "out of memory")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_an_output_that_cannot_be_written(conversion, monkeypatch, code):
    mkdir = Path.mkdir

    def refused(path, *arguments, **options):
        if path == conversion.out.with_name("out.partial"):
            raise OSError(code, os.strerror(code), str(path))
        return mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    check_refused(conversion, *conversion.run(), "out.partial")


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old one"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_while_a_slow_disk_renames(conversion, monkeypatch, when, old):
    """Stop the process while the output is renamed, as on a slow network disk."""
    if old:
        assert conversion.run()[0] == 0
        before = (conversion.out / "surgery_report.json").read_bytes()
    rename = os.rename

    def slowly(source, target):
        if when == "before" and str(target) == str(conversion.out):
            os.kill(os.getpid(), signal.SIGTERM)
        rename(source, target)
        if when == "after" and str(target) == str(conversion.out):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "rename", slowly)
    ended, lines = conversion.run("--overwrite", "--seed", "1")
    assert ended == 143 and lines[-1].startswith("surgery: interrupted")
    leftovers = {path.name for path in conversion.folder.iterdir()} - {"source", "temporary"}
    if when == "before" and not old:
        assert not leftovers
    else:
        CheckpointReader.open(conversion.out)
        report = (conversion.out / "surgery_report.json").read_bytes()
        assert when == "after" or report == before
        assert leftovers == {"out"}
