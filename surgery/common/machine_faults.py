"""One-line messages for machine faults: out of memory, out of threads, full or failing disks."""

from __future__ import annotations

import errno
import os

from surgery.common.errors import SurgeryError

_FULL = (errno.ENOSPC, errno.EDQUOT)
# torch has no error classes for these.
_TOO_LARGE = ("can't allocate memory", "cannot allocate memory", "out of memory", "not enough memory", "bad_alloc")
_TOO_LARGE += ("storage size calculation overflowed", "failed to map segment")
_MEMORY = "out of memory; close other programs, raise the limit (ulimit -v), or reduce --batch-size or "
_MEMORY += "--calibration-length"
_THREADS = "the system cannot start more threads or processes; raise the limit (ulimit -u), or set OMP_NUM_THREADS=1"
_FREE = "free some space, or choose another --out (temporary files of an output lie next to it) or another TMPDIR"
_UNWRITTEN = ("PytorchStreamWriter", "unexpected pos", "No space left on device")


def fault_message(error: BaseException) -> str | None:
    """Return the message for a machine fault; None for any other error.

    Errors of input and output files are reported where they occur, with advice. This covers temporary files and memory.
    """
    text = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    of_memory = isinstance(error, RuntimeError | ImportError) and any(part in text.lower() for part in _TOO_LARGE)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or of_memory:
        return _MEMORY
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in text):
        return _THREADS
    if is_panic(error):
        return f"a tokenizer failed: {text[:200]}; repair its tokenizer.json or use another tokenizer"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"{error.filename or 'a temporary file'}: no space left on the disk; {_FREE}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a temporary file'}: {error.strerror or text}"
    # Compared by name: most commands report errors without importing safetensors.
    is_write_error = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    if is_write_error and any(part in text for part in _UNWRITTEN):
        return f"a temporary file could not be written; {_FREE}"
    return None


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of Rust code such as tokenizers, which does not derive from Exception."""
    return type(error).__name__ == "PanicException"


def check_working_folder() -> None:
    """Check that the working folder exists. Raises SurgeryError: it was deleted."""
    try:
        os.getcwd()
    except OSError as error:
        raise SurgeryError(f"the working folder: {error.strerror or error}; change to one that exists") from None
