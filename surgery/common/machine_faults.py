"""Messages of one line for faults of the machine: memory that runs out and disks that fail."""

from __future__ import annotations

import errno
import os

from surgery.common.errors import SurgeryError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# torch has no kinds of errors of its own for these.
_TOO_LARGE = ("can't allocate memory", "cannot allocate memory", "out of memory", "not enough memory", "bad_alloc")
_TOO_LARGE += ("storage size calculation overflowed", "failed to map segment")
_MEMORY = "out of memory; close other programs, raise the limit (ulimit -v), or ask for less: --batch-size, "
_MEMORY += "--calibration-length"
_THREADS = "the system starts no more threads or processes; raise the limit (ulimit -u), or set OMP_NUM_THREADS=1"
_FREE = "free some, or choose another --out (temporary files of an output lie next to it) or another TMPDIR"
_UNWRITTEN = ("PytorchStreamWriter", "unexpected pos", "No space left on device")


def fault_message(error: BaseException) -> str | None:
    """Return the message for an error of the machine; None for one of the program's own.

    Errors of files that a command was asked to read or write are told where they happen, with what to do; this is for
    the temporary ones, and for memory, which can end anywhere.
    """
    text = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    of_memory = isinstance(error, RuntimeError | ImportError) and any(part in text.lower() for part in _TOO_LARGE)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or of_memory:
        return _MEMORY
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in text):
        return _THREADS
    if is_panic(error):
        return f"a tokenizer failed: {text[:200]}; its tokenizer.json asks for more than it can do, use another"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"{error.filename or 'a temporary file'}: no space left on the disk; {_FREE}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a temporary file'}: {error.strerror or text}"
    # safetensors has errors of its own; its name is looked at, as most commands' mistakes are told without importing
    # it.
    is_write_error = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    if is_write_error and any(part in text for part in _UNWRITTEN):
        return f"a temporary file could not be written; {_FREE}"
    return None


def is_panic(error: BaseException) -> bool:
    """Return whether Rust code, such as that of tokenizers, gave up: an error that Python does not take for one."""
    return type(error).__name__ == "PanicException"


def check_working_folder() -> None:
    """Check that relative paths lead somewhere.

    Raises:
        SurgeryError: the working folder was deleted.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise SurgeryError(f"the working folder: {error.strerror or error}; change to one that exists") from None
