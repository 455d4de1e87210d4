"""Limits of the machine, met anywhere, as one line; errors of the program stay what they are."""

import errno
import os
import threading

import pytest
import torch
from command_line import run_main
from hostile import bounded_memory

from surgery.common.machine_faults import fault_message
from surgery.console import inspection

LINES = {
    "memory": [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("std::bad_alloc"),
        ImportError("libx.so: failed to map segment from shared object"),
        ImportError("libx.so: cannot allocate memory in static TLS block"),
    ],
    "ulimit -u": [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))],
    "no space left": [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/x")],
}


@pytest.mark.parametrize(("words", "error"), [(words, error) for words, errors in LINES.items() for error in errors])
def test_lines(words, error):
    line = fault_message(error)
    assert words in line and "\n" not in line


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), ImportError("no module x"), ValueError(), KeyError("x")])
def test_mistakes_of_the_program_are_not_hidden(error):
    assert fault_message(error) is None


def no_thread(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    threading.Thread(target=print).start()


def no_memory(monkeypatch):
    with bounded_memory(2**24):
        torch.zeros(2**28)


class PanicException(BaseException):
    """PanicException like pyo3's: no Exception."""


def panic(monkeypatch):
    raise PanicException("called `Result::unwrap()` on an `Err` value")


@pytest.mark.parametrize(("fault", "words"), [(no_thread, ""), (no_memory, "memory"), (panic, "tokenizer")])
def test_a_command_ends_in_one_line(fault, words, checkpoints, monkeypatch, capsys):
    monkeypatch.setattr(inspection, "show_inspection", lambda *arguments, **options: fault(monkeypatch))
    code, _, errors = run_main(monkeypatch, capsys, "inspect", checkpoints("llama"), "--quiet")
    assert code == 1 and errors.startswith("surgery: error: ") and errors.count("\n") == 1 and words in errors
